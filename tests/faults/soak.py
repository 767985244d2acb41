"""Random faults in one job of two workers. The result equals that of an uninterrupted run.

    python tests/faults/soak.py --faults=40 --seed=1

Half of them come at random steps. The other half hit an attempt that a kill has just started: before
the strategy, while it is built and restored, compiled, and in the first moments of training and saving.

Prints a Markdown table of every fault: how soon it was noticed, how soon training resumed, how many
steps were done again. Exit code 1 if the end differs by a bit. Decision 27 has such a table.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
sys.path[:0] = [str(DIRECTORY.parent), str(DIRECTORY.parent / "programs"), str(DIRECTORY.parent.parent)]

import ctl  # noqa: E402, F401  sets the environment that the warm server of the tests expects
import training  # noqa: E402  its folder is on the path by now

STEPS_BETWEEN_FAULTS = (12, 24)  # steps between two faults
LAUNCHER = ("--max_restarts=1000", "--heartbeat_timeout_secs=10", "--backoff_secs=0.5")


@dataclass
class Fault:
    """A fault and its effects (seconds and steps)."""

    fault_kind: str
    step: int
    phase: str = "a step"
    noticed_secs: float = 0.0
    recovered_secs: float = 0.0
    steps_lost: int = 0


def newest(model_dir):
    steps = training.saved(model_dir)
    return model_dir / "checkpoints" / f"ckpt-{steps[-1]}" if steps else None


def damage(model_dir, damage_kind):
    """Flips a bit of the newest checkpoint, cuts it short, or empties its manifest."""
    directory = newest(model_dir)
    if directory is None:
        return
    data = directory / "state.data-00000-of-00001"
    if damage_kind == "flip":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage_kind == "cut":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    else:
        (directory / "manifest.json").write_bytes(b"")


def apply_fault(fault_kind, model_dir, launcher):
    """Causes a fault. `Soak` restarts a job if the launcher has ended too, as a platform would."""
    action, _, target = fault_kind.partition(" ")
    if target == "launcher":
        training.send(launcher.pid, action)
        return
    if action == "damage":
        damage(model_dir, target)
        action, target = "KILL", "worker 1"
    training.send(training.pids(model_dir)[int(target.rpartition(" ")[2])], action)


KINDS = ("KILL worker 0", "KILL worker 1", "STOP worker 0", "STOP worker 1", "TERM worker 0",
         "TERM worker 1", "TERM launcher", "KILL launcher", "damage flip", "damage cut",
         "damage manifest")  # fmt: skip


PHASES = ("spawned", "starting", "compiling", "training", "saving")


class Soak:
    """One job that is restarted after every end."""

    def __init__(self, model_dir, steps, pause_secs):
        self.model_dir = model_dir
        self.options = (f"--train_steps={steps}",)
        self.env = {"PAUSE_SECS": str(pause_secs)}
        self.context = None
        self.start()

    def start(self):
        self.context = training.started(
            self.model_dir, *self.options, workers=2, launcher=LAUNCHER, **self.env
        )
        self.process = self.context.__enter__()

    def stop(self):
        self.context.__exit__(None, None, None)

    def step(self):
        try:
            return max(training.trace(self.model_dir), default=0)
        except (AssertionError, ValueError):  # a line is just being written
            return 0

    def text(self):
        return training.output_of(self.model_dir).read_text(errors="replace")

    def reach(self, step):
        """Waits until that step was logged; a launcher that was ended is started again."""
        deadline = time.monotonic() + training.TIMEOUT_SECS
        while self.step() < step:
            if self.process.poll() not in (None, 0):
                self.stop()
                self.start()
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.02)

    def inject(self, fault_kind):
        """Causes one fault. Waits until training has progressed beyond it."""
        fault = Fault(fault_kind, self.step())
        notices, start_secs = self.noticed(), time.monotonic()
        apply_fault(fault_kind, self.model_dir, self.process)
        fault.noticed_secs = self.until_noticed(notices, start_secs)
        resumed = self.resumed()
        while self.resumed() == resumed:
            if self.process.poll() is not None:
                self.stop()
                self.start()
            time.sleep(0.02)
            assert time.monotonic() - start_secs < training.TIMEOUT_SECS, self.text()[-3000:]
        resumed_step = self.resumed()[1]
        self.reach(resumed_step + 1)
        fault.recovered_secs = time.monotonic() - start_secs
        fault.steps_lost = max(0, fault.step - resumed_step)
        return fault

    def inject_at_start(self, fault_kind, phase, generator):
        """Causes a kill and a fault in the next attempt. Waits until training has progressed beyond it."""
        fault = Fault(fault_kind, self.step(), phase)
        before = self.running()
        training.send(before[1], "KILL")
        start_secs = time.monotonic()
        while not (
            set(self.running()) == {0, 1} and not set(self.running().values()) & set(before.values())
        ):
            time.sleep(0.01)
            assert time.monotonic() - start_secs < training.TIMEOUT_SECS, self.text()[-3000:]
        victim = int(fault_kind[-1]) if fault_kind[-1].isdigit() else 1
        while phase != "spawned" and self.phase(victim) != phase and self.step() <= fault.step:
            time.sleep(0.005)
            assert time.monotonic() - start_secs < training.TIMEOUT_SECS, self.text()[-3000:]
        time.sleep(generator.uniform(0.0, 1.0))
        notices, start_secs = self.noticed(), time.monotonic()
        apply_fault(fault_kind, self.model_dir, self.process)
        fault.noticed_secs = self.until_noticed(notices, start_secs)
        self.reach(max(fault.step, self.step()) + 1)
        fault.recovered_secs = time.monotonic() - start_secs
        return fault

    def until_noticed(self, notices, start_secs):
        """Waits until the launcher reports a further end, or ends. Returns the seconds since `began`."""
        while self.noticed() == notices and self.process.poll() is None:
            time.sleep(0.01)
            assert time.monotonic() - start_secs < training.TIMEOUT_SECS, self.text()[-3000:]
        return time.monotonic() - start_secs

    def running(self):
        return training.pids(self.model_dir)

    def phase(self, worker):
        """Returns the phase in the worker's last heartbeat of this attempt."""
        try:
            environ = Path(f"/proc/{self.running()[worker]}/environ").read_bytes().split(b"\0")
            prefix = b"CTL_HEARTBEAT="
            path = next(e.removeprefix(prefix) for e in environ if e.startswith(prefix))
            return json.loads(Path(os.fsdecode(path)).read_text())["phase"]
        except (OSError, ValueError, KeyError, StopIteration):
            return ""

    def noticed(self):
        """Returns the number of ends that the launcher has reported."""
        return len(re.findall(r"^ctl launch: .*(?:failed|killed|ended|received)", self.text(), re.M))

    def resumed(self):
        """Returns the number of resumptions and the step of the last one."""
        steps = re.findall(r"resuming at step (\d+)", self.text())
        return len(steps), int(steps[-1]) if steps else 0


def table(faults):
    lines = [
        "| fault | at | step | noticed after s | training again after s | steps done again |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {f.fault_kind} | {f.phase} | {f.step} | {f.noticed_secs:.1f} | {f.recovered_secs:.1f} "
        f"| {f.steps_lost} |"
        for f in faults
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pause_secs", type=float, default=0.1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    generator = random.Random(arguments.seed)
    kinds = [*KINDS, *(generator.choice(KINDS) for _ in range(arguments.faults))][: arguments.faults]
    generator.shuffle(kinds)
    phases = [PHASES[i % len(PHASES)] for i in range(len(kinds) // 2)]
    phases += [""] * (len(kinds) - len(phases))
    generator.shuffle(phases)
    marks, at = [], 8
    for _ in kinds:
        at += generator.randint(*STEPS_BETWEEN_FAULTS)
        marks.append(at)
    steps = at + 20
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        unbroken = base / "unbroken"
        result = training.run(unbroken, f"--train_steps={steps}", workers=2)
        assert result.code == 0, result.output[-3000:]
        soak, faults = Soak(base / "soak", steps, arguments.pause_secs), []
        for fault_kind, phase, mark in zip(kinds, phases, marks, strict=True):
            soak.reach(mark)
            fault = soak.inject_at_start(fault_kind, phase, generator) if phase else soak.inject(fault_kind)
            faults.append(fault)
            print(json.dumps(vars(faults[-1])), flush=True)
        soak.reach(steps)
        code = soak.process.wait(training.TIMEOUT_SECS)
        training.assert_bit_identical(base / "soak", unbroken, steps)
        names = sorted(p.name for p in (base / "soak" / "checkpoints").iterdir())
        assert not [n for n in names if "temp" in n or n.startswith("tmp")], names
        print(f"\n{table(faults)}\n")
        print(f"exit code {code}; all {steps} steps are bit for bit those of the unbroken run")
        return code
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
