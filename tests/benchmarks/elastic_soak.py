"""One elastic job with many faults, compared with the same training on one device.

    python tests/benchmarks/elastic_soak.py --faults=60 --seed=0

Workers are killed (also the chief, and two at once) or stopped at random steps. Prints the faults that
occurred, the changes of the group, the time between the last step of a group and the first one of the next
(s), the largest differences of losses and variables, and whether each example was used equally often.
"""

import collections
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import app, flags

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
sys.path[:0] = [str(ROOT / "tests"), str(PROGRAMS)]
import training  # noqa: E402

_FAULTS = flags.DEFINE_integer("faults", 60, "Number of faults.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of their steps, kinds and ranks.")
_WORKERS = flags.DEFINE_string("workers", "1:4", "MIN:MAX.")
_STEPS = flags.DEFINE_integer("steps_per_fault", 50, "Average number of steps between two faults.")
_PAUSE_SECS = flags.DEFINE_float("pause_secs", 0.25, "Pause after each step (seconds).")


def draw_faults(count: int, seed: int) -> str:
    """Returns the faults in the form of faulty.py: the kinds, steps and ranks of the workers."""
    source, faults, step = random.Random(seed), list[str](), 50
    while len(faults) < count:
        step += source.randint(_STEPS.value // 2, _STEPS.value * 3 // 2)
        rank = source.choice([0, 0, 1, 2])
        kind = source.choice(["kill"] * 9 + ["stop"])
        faults.append(f"{kind}@{step}:{rank}")
        if source.random() < 0.15 and len(faults) < count:  # two at once
            faults.append(f"kill@{step}:{rank + 1}")
    return " ".join(faults)


def run(model_dir: Path, num_steps: int, workers: str = "", faults: str = "") -> str:
    """Runs the job of leaving.py. Returns its output."""
    marks = model_dir.with_name(f"{model_dir.name}-marks")
    marks.mkdir()
    limits = (f"--workers={workers}", "--heartbeat_timeout_secs=5")
    launcher = [sys.executable, "-m", "ctl.launch", *limits, "--"]
    command = [
        *(launcher if workers else []), sys.executable, str(PROGRAMS / "leaving.py"),
        f"--model_dir={model_dir}", f"--train_steps={num_steps}", f"--save_every_steps={num_steps}",
        *("--global_batch_size=12", "--steps_per_loop=1", "--log_every_steps=1"),
        *("--export=none", "--dropout=0"),
    ]  # fmt: skip
    # the learning rate is still 0.006 in the last step, so an error in any step changes the variables
    variables = {"DECAY_STEPS": str(num_steps // 20), "FAULTS": faults, "FAULTS_DIR": str(marks)}
    if workers:
        variables["PAUSE_SECS"] = str(_PAUSE_SECS.value)
    path = os.pathsep.join([str(ROOT), str(PROGRAMS)])
    result = subprocess.run(
        command,
        env={**os.environ, **variables, "PYTHONPATH": path},
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if result.returncode:
        sys.exit(f"exit code {result.returncode}\n{result.stdout[-6000:]}")
    return result.stdout


def print_pauses(facts: list[dict]) -> None:
    """Prints the time between the last step of a group and the first one of the next group."""
    steps = sorted((fact for fact in facts if "step" in fact), key=lambda fact: fact["time"])
    pauses = collections.defaultdict(list)
    for before, after in itertools.pairwise(steps):
        if before["size"] != after["size"]:
            secs = after["time"] - before["time"] - _PAUSE_SECS.value
            pauses[before["size"] > after["size"]].append(secs)
    for is_loss, name in ((True, "fewer workers"), (False, "more workers")):
        secs = pauses[is_loss]
        if secs:
            print(f"{name}: {len(secs)} changes, median {statistics.median(secs):.2f}, "
                  f"longest {max(secs):.2f} s")  # fmt: skip


def main(_: list[str]) -> None:
    faults = draw_faults(_FAULTS.value, _SEED.value)
    num_steps = 200 + max(int(fault.partition("@")[2].partition(":")[0]) for fault in faults.split())
    with tempfile.TemporaryDirectory() as directory:
        expected, model_dir = Path(directory) / "expected", Path(directory) / "elastic"
        run(expected, num_steps)
        output = run(model_dir, num_steps, _WORKERS.value, faults)
        kinds = {name: output.count(f"fault: {name}") for name in ("kill", "stop")}
        print(f"{num_steps} steps, {kinds}, {output.count('restart ')} restarts of all workers")
        print_pauses([json.loads(text) for text in re.findall(r"<stdout>:(\{.*\})", output)])
        losses, expected_losses = (training.trace(path) for path in (model_dir, expected))
        values, expected_values = (training.tensors(path, num_steps) for path in (model_dir, expected))
    if list(losses) != list(expected_losses) or values.keys() != expected_values.keys():
        sys.exit("the steps in metrics.jsonl or the variables differ from those on one device")
    (seen,) = (name for name in values if name.startswith("seen/"))
    print(f"examples used equally often: {np.array_equal(values[seen], expected_values[seen])}")
    difference = max(abs(losses[step] - loss) for step, loss in expected_losses.items())
    print(f"largest difference of a loss: {difference:.1e}")
    floats = [name for name, value in values.items() if np.issubdtype(value.dtype, np.floating)]
    difference = max(float(np.abs(values[name] - expected_values[name]).max()) for name in floats)
    print(f"largest difference of a variable: {difference:.1e}")


if __name__ == "__main__":
    app.run(main)
