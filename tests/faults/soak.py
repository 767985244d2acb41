"""Random faults over one job of two workers; the end is that of an unbroken run.

    python tests/faults/soak.py --faults=40 --seed=1

Half of them come at random steps. The other half hit an attempt that a kill has just started: before
the strategy, while it is built and restored, compiled, and in the first moments of training and saving.

Prints a Markdown table of every fault: how soon it was noticed, how soon training went on, how many
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "programs"), str(HERE.parent.parent)]

import ctl  # noqa: E402, F401  sets the environment that the warm server of the tests expects
import training  # noqa: E402  its folder is on the path by now

GAP = (12, 24)  # steps between two faults
LAUNCHER = ("--max_restarts=1000", "--heartbeat_timeout_secs=10", "--backoff_secs=0.5")


@dataclass
class Fault:
    """One fault and what came of it; seconds and steps."""

    kind: str
    step: int
    place: str = "a step"
    noticed_secs: float = 0.0
    recovered_secs: float = 0.0
    steps_lost: int = 0


def newest(model_dir):
    found = training.saved(model_dir)
    return model_dir / "checkpoints" / f"ckpt-{found[-1]}" if found else None


def damage(model_dir, how):
    """Flips a bit of the newest checkpoint, cuts it short, or empties its manifest."""
    directory = newest(model_dir)
    if directory is None:
        return
    data = directory / "state.data-00000-of-00001"
    if how == "flip":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "cut":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    else:
        (directory / "manifest.json").write_bytes(b"")


def strike(kind, model_dir, launcher):
    """Does it. What ends the launcher as well is started again by `Soak`, as a platform would."""
    word, _, rest = kind.partition(" ")
    if rest == "launcher":
        training.send(launcher.pid, word)
        return
    if word == "damage":
        damage(model_dir, rest)
        word, rest = "KILL", "worker 1"
    training.send(training.pids(model_dir)[int(rest.rpartition(" ")[2])], word)


KINDS = ("KILL worker 0", "KILL worker 1", "STOP worker 0", "STOP worker 1", "TERM worker 0",
         "TERM worker 1", "TERM launcher", "KILL launcher", "damage flip", "damage cut",
         "damage manifest")  # fmt: skip


PLACES = ("spawned", "starting", "compiling", "training", "saving")


class Soak:
    """One job that goes on whatever happens."""

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

    def suffer(self, kind):
        """One fault, from its moment until training goes on beyond it."""
        fault = Fault(kind, self.step())
        told, began = self.noticed(), time.monotonic()
        strike(kind, self.model_dir, self.process)
        fault.noticed_secs = self.until_noticed(told, began)
        resumed = self.resumed()
        while self.resumed() == resumed:
            if self.process.poll() is not None:
                self.stop()
                self.start()
            time.sleep(0.02)
            assert time.monotonic() - began < training.TIMEOUT_SECS, self.text()[-3000:]
        back = self.resumed()[1]
        self.reach(back + 1)
        fault.recovered_secs = time.monotonic() - began
        fault.steps_lost = max(0, fault.step - back)
        return fault

    def suffer_at_start(self, kind, place, dice):
        """A kill, and one fault within the attempt that follows; until training goes on beyond it."""
        fault = Fault(kind, self.step(), place)
        before = self.running()
        training.send(before[1], "KILL")
        began = time.monotonic()
        while not (
            set(self.running()) == {0, 1} and not set(self.running().values()) & set(before.values())
        ):
            time.sleep(0.01)
            assert time.monotonic() - began < training.TIMEOUT_SECS, self.text()[-3000:]
        victim = int(kind[-1]) if kind[-1].isdigit() else 1
        while place != "spawned" and self.phase(victim) != place and self.step() <= fault.step:
            time.sleep(0.005)
            assert time.monotonic() - began < training.TIMEOUT_SECS, self.text()[-3000:]
        time.sleep(dice.uniform(0.0, 1.0))
        told, began = self.noticed(), time.monotonic()
        strike(kind, self.model_dir, self.process)
        fault.noticed_secs = self.until_noticed(told, began)
        self.reach(max(fault.step, self.step()) + 1)
        fault.recovered_secs = time.monotonic() - began
        return fault

    def until_noticed(self, told, began):
        """Seconds since `began` until the launcher says more endings than it had told, or ends itself."""
        while self.noticed() == told and self.process.poll() is None:
            time.sleep(0.01)
            assert time.monotonic() - began < training.TIMEOUT_SECS, self.text()[-3000:]
        return time.monotonic() - began

    def running(self):
        return training.pids(self.model_dir)

    def phase(self, worker):
        """What the worker said last that it is doing, in this attempt."""
        try:
            environ = Path(f"/proc/{self.running()[worker]}/environ").read_bytes().split(b"\0")
            prefix = b"CTL_HEARTBEAT="
            path = next(e.removeprefix(prefix) for e in environ if e.startswith(prefix))
            return json.loads(Path(os.fsdecode(path)).read_text())["phase"]
        except (OSError, ValueError, KeyError, StopIteration):
            return ""

    def noticed(self):
        """How often the launcher has said that something ended."""
        return len(re.findall(r"^ctl launch: .*(?:failed|killed|ended|received)", self.text(), re.M))

    def resumed(self):
        """(how often training was resumed, at which step the last time)."""
        steps = re.findall(r"resuming at step (\d+)", self.text())
        return len(steps), int(steps[-1]) if steps else 0


def table(faults):
    lines = [
        "| fault | at | step | noticed after s | training again after s | steps done again |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {f.kind} | {f.place} | {f.step} | {f.noticed_secs:.1f} | {f.recovered_secs:.1f} "
        f"| {f.steps_lost} |"
        for f in faults
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pause_secs", type=float, default=0.1)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    dice = random.Random(asked.seed)
    kinds = [*KINDS, *(dice.choice(KINDS) for _ in range(asked.faults))][: asked.faults]
    dice.shuffle(kinds)
    places = [PLACES[i % len(PLACES)] for i in range(len(kinds) // 2)]
    places += [""] * (len(kinds) - len(places))
    dice.shuffle(places)
    marks, at = [], 8
    for _ in kinds:
        at += dice.randint(*GAP)
        marks.append(at)
    steps = at + 20
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        whole = base / "unbroken"
        done = training.run(whole, f"--train_steps={steps}", workers=2)
        assert done.code == 0, done.output[-3000:]
        soak, faults = Soak(base / "soak", steps, asked.pause_secs), []
        for kind, place, mark in zip(kinds, places, marks, strict=True):
            soak.reach(mark)
            hit = soak.suffer_at_start(kind, place, dice) if place else soak.suffer(kind)
            faults.append(hit)
            print(json.dumps(vars(faults[-1])), flush=True)
        soak.reach(steps)
        code = soak.process.wait(training.TIMEOUT_SECS)
        training.assert_bit_identical(base / "soak", whole, steps)
        left = sorted(p.name for p in (base / "soak" / "checkpoints").iterdir())
        assert not [n for n in left if "temp" in n or n.startswith("tmp")], left
        print(f"\n{table(faults)}\n")
        print(f"exit code {code}; all {steps} steps are bit for bit those of the unbroken run")
        return code
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
