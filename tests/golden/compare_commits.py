"""Trains the cases of cases.py with an older commit and with this tree, and compares them bit for bit.

    python tests/golden/compare_commits.py --base=HEAD~1
    python tests/golden/compare_commits.py --base=HEAD~1 --only mnist fit

Also resumes a checkpoint which the older commit has written. Prints a line for each case. The exit code is
1 if a case differs. Run by hand: the bits depend on the machine and on the version of TensorFlow.
traces.py records the outcomes for the test suite.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECS = 600
STEPS = 30  # of cases.py
CASES = (
    "mnist", "mnist_two_replicas", "accumulated", "accumulated_two_replicas", "scaled_two_replicas",
    "words", "words_two_replicas", "fit", "compiled", "compiled_step_two_replicas",
)  # fmt: skip
TWO_WORKERS = ["--workers=2"]
JOBS = {  # cases of several processes, with the options of `ctl launch`
    "mnist_workers": TWO_WORKERS,
    "words_workers": TWO_WORKERS,
    "local_steps_workers": TWO_WORKERS,
    "outer_steps_workers": TWO_WORKERS,
    "int8_workers": TWO_WORKERS,
    "parameter_server": ["--workers=1", "--ps=1", "--chief"],
}
RESUMED = "mnist"  # with the older commit until step STEPS - 10, then with this tree


def outcome(tree: Path, name: str, model_dir: Path | None = None, *, run=subprocess.run) -> dict:
    """Returns the JSON line of a case that runs with the packages of `tree`, in processes of `run`."""
    program = [sys.executable, str(ROOT / "tests" / "golden" / "cases.py"), name]
    if model_dir is not None:
        program.append(str(model_dir))
    if name in JOBS:
        logs = tempfile.mkdtemp(prefix="golden-")
        program = [sys.executable, "-m", "ctl", "launch", *JOBS[name], f"--log_dir={logs}", "--", *program]
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    completed = run(program, cwd=tree, env=environ, timeout=TIMEOUT_SECS, **streams)
    lines = [line for line in completed.stdout.splitlines() if line.startswith("{")]
    if completed.returncode or not lines:
        raise SystemExit(
            f"{name} failed in {tree}:\n{completed.stdout[-2000:]}\n{completed.stderr[-2000:]}"
        )
    return json.loads(lines[-1])


def resumed(base: Path, unbroken: dict) -> str:
    """Compares the last 10 steps, resumed in this tree from a checkpoint of the older commit."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "run"
        outcome(base, RESUMED, model_dir)
        shutil.rmtree(model_dir / "checkpoints" / f"ckpt-{STEPS}")
        actual = outcome(ROOT, RESUMED, model_dir)
    expected = {**unbroken, "losses": unbroken["losses"][-10:]}
    return difference(expected, actual)


def difference(expected: dict, actual: dict) -> str:
    """Returns "equal", or what differs first."""
    if len(expected["losses"]) != len(actual["losses"]):
        return f"DIFFERS: {len(expected['losses'])} losses, now {len(actual['losses'])}"
    for number, (before, after) in enumerate(zip(expected["losses"], actual["losses"], strict=True), 1):
        if before != after:
            return f"DIFFERS: loss {number} was {float.fromhex(before)}, is {float.fromhex(after)}"
    return "equal" if expected == actual else "DIFFERS: the weights, not the losses"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="commit that trains as expected")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *JOBS], help="cases; all by default")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        base = Path(directory) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", base, flags.base], cwd=ROOT, check=True)
        try:
            results = {name: compare(base, name) for name in flags.only or [*CASES, *JOBS]}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    return int(any(text != "equal" for text in results.values()))


def compare(base: Path, name: str) -> str:
    expected = outcome(base, name)
    text = difference(expected, outcome(ROOT, name))
    print(f"{name:28} {text}", flush=True)
    if name == RESUMED and text == "equal":
        text = resumed(base, expected)
        print(f"{name + ', resumed':28} {text}", flush=True)
    return text


if __name__ == "__main__":
    sys.exit(main())
