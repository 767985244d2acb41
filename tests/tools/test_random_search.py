"""`ctl sweep --random` and `--early_stop`: ranges, random combinations and the median rule."""

import json
import math
import random
import statistics
import sys

import pytest
from conftest import environment
from ctl.errors import UsageError
from ctl.tools import median_rule
from ctl.tools.random_search import NumberRange, ValueList, parse_range, random_combinations
from ctl.tools.sweep_plan import plan_runs
from processes import run

PROGRAM = """
import json, os, signal, sys, time
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])  # waits, at, code and completes
path = os.path.join(flags["model_dir"], "metrics.jsonl")
is_resumed = os.path.exists(path)
rate, is_stopped = float(flags["rate"]), []
signal.signal(signal.SIGTERM, lambda *_: is_stopped.append(True))
with open(path, "a") as file:
    for step in (1, 2, 3):
        value = rate / step
        row = {"step": step, "run": "eval", "loss": value, "accuracy": -value}
        file.write(json.dumps(row) + chr(10))
        file.flush()
        is_slow = flags.get("waits") == flags["rate"] and step == int(flags.get("at", 2))
        deadline = time.monotonic() + (4 if step == 3 else 600)
        while is_slow and not is_stopped and time.monotonic() < deadline and not is_resumed:
            time.sleep(0.02)
        if is_stopped and (step == 3 or "completes" not in flags):
            sys.exit(int(flags.get("code", 143)))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)]


def run_sweep(arguments, cwd):
    return run([sys.executable, "-m", "ctl", "sweep", *arguments], env=environment(), cwd=cwd)


def state(directory):
    return json.loads((directory / "sweep.json").read_text())["runs"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-5:1e-2:log", NumberRange(1e-5, 1e-2, is_log=True)),
        ("0:0.5", NumberRange(0.0, 0.5)),
        ("-1:1:uniform", NumberRange(-1.0, 1.0)),
        ("16:256:int", NumberRange(16, 256, is_integer=True)),
        ("16:256:int:log", NumberRange(16, 256, is_log=True, is_integer=True)),
        ("16:256:log:int", NumberRange(16, 256, is_log=True, is_integer=True)),
        ("gs://bucket/a", None),
        ("host:80", None),
        (r"100\:110", None),
        ("relu", None),
    ],
)
def test_a_range_is_recognized(value, expected):
    assert parse_range(f"--a={value}", value) == expected


def test_numbers_are_distributed_over_the_range():
    generator = random.Random(1)
    logarithmic = [float(NumberRange(1e-4, 1.0, is_log=True).draw(generator)) for _ in range(2000)]
    assert min(logarithmic) >= 1e-4 and max(logarithmic) <= 1.0
    assert 0.005 < statistics.median(logarithmic) < 0.02
    uniform = [float(NumberRange(2.0, 4.0).draw(generator)) for _ in range(2000)]
    assert 2.9 < statistics.mean(uniform) < 3.1 and min(uniform) >= 2.0 and max(uniform) <= 4.0
    integers = [NumberRange(1, 4, is_integer=True).draw(generator) for _ in range(2000)]
    assert set(integers) == {"1", "2", "3", "4"} and 400 < integers.count("1") < 600
    narrow = NumberRange(0.1234567891, 0.1234567892)  # six digits are outside
    assert {narrow.draw(generator)[:11] for _ in range(9)} == {"0.123456789"}


def test_combinations_are_different_and_depend_on_the_seed_only():
    domains = {"rate": NumberRange(0.0, 1.0), "units": ValueList(["1", "2"])}
    first = random_combinations(domains, 5, seed=3)
    assert random_combinations(domains, 8, seed=3)[:5] == first
    assert random_combinations(domains, 5, seed=4) != first
    finite = {"a": ValueList(["1", "2"]), "b": NumberRange(1, 3, is_integer=True)}
    assert len({tuple(c.values()) for c in random_combinations(finite, 6, seed=0)}) == 6
    with pytest.raises(UsageError, match="--random=7 is more than the 6 combinations"):
        random_combinations(finite, 7, seed=0)
    narrow = {"rate": NumberRange(0.1, 0.1000001)}  # with six digits, its numbers are equal
    with pytest.raises(UsageError, match="--random=3 found only 1 different combinations"):
        random_combinations(narrow, 3, seed=0)


def test_the_runs_have_their_values_and_other_flags_stay(tmp_path):
    command = [sys.executable, "--rate=1e-5:1e-2:log", "--name=a,b", r"--profile=10\:20", "--x=1"]
    directory, runs = plan_runs(command, str(tmp_path), 6, 0)
    assert directory == tmp_path and len({r.name for r in runs}) == 6
    for sweep_run in runs:
        assert 1e-5 <= float(sweep_run.settings["rate"]) <= 1e-2
        assert sweep_run.settings["name"] in ("a", "b")
        assert "--profile=10:20" in sweep_run.command and "--x=1" in sweep_run.command
        assert f"--rate={sweep_run.settings['rate']}" in sweep_run.command
    _, grid = plan_runs([sys.executable, "--profile=10:20", "--rate=1,2"], str(tmp_path))
    assert "--profile=10:20" in grid[0].command


@pytest.mark.parametrize(
    ("options", "flags", "error_message"),
    [
        (["--random=3"], ["--rate=1e-2:1e-5:log"], "is an empty range; expected low < high"),
        (["--random=3"], ["--rate=0:1:log"], "low value 0; expected a number > 0"),
        (["--random=3"], ["--rate=0:1:lgo"], "is not a range"),
        (["--random=3"], ["--rate=a:1:log"], "is not a range"),
        (["--random=3"], ["--rate=1:2:log:log"], "is not a range"),
        (["--random=3"], ["--rate=0:inf"], "not finite; expected finite numbers"),
        (["--random=3"], ["--rate=nan:1"], "not finite; expected finite numbers"),
        (["--random=3"], ["--units=1:2.5:int"], "not whole"),
        (["--random=3"], ["--rate=1"], "no flag of the command has several values"),
        (["--random=3"], ["p", "--rate", "1e-3:1e-2:log"], "Write --rate=1e-3:1e-2:log, with \"=\""),
        (["--random=3"], ["--rate", "1:2"], "Write --rate=1:2, with \"=\""),
        ([], ["--rate", "1,2"], "Write --rate=1,2, with \"=\""),
        ([], ["--rate", "1"], "no flag of the command has several values; expected e.g. ctl sweep"),
        (["--random=3"], ["--a=1,2"], "more than the 2 combinations"),
        (["--random=0"], ["--rate=0:1"], "--random=0 is invalid"),
        (["--random=x"], ["--rate=0:1"], "--random"),
        (["--random=3"], ["--rate=0:1", "--rate=1:2"], "--rate was given twice"),
        (["--early_stop=0"], ["--rate=1,2"], "--early_stop=0 is invalid"),
        ([], ["--rate=1e-5:1e-2:log"], "is a range, which needs --random=N"),
    ],
)
def test_invalid_ranges_are_refused_before_any_run(tmp_path, options, flags, error_message):
    result = run_sweep([*options, "--", sys.executable, *flags], tmp_path)
    assert result.returncode == 2 and error_message in result.stderr and not result.stdout
    assert not list(tmp_path.iterdir())


def test_a_longer_random_search_continues_a_shorter_one(tmp_path, program):
    arguments = ["--seed=5", "--", *program, "--rate=1:2"]
    first = run_sweep(["--random=2", *arguments], tmp_path)
    assert first.returncode == 0, first.stderr
    names = list(state(tmp_path / "sweep"))
    second = run_sweep(["--random=3", *arguments], tmp_path)
    assert second.returncode == 0 and "3 runs, 2 already completed" in second.stderr
    assert list(state(tmp_path / "sweep"))[:2] == names


@pytest.mark.parametrize("options", [[], ["--metric=accuracy", "--max"]])
def test_a_run_that_is_worse_than_the_median_ends_early(tmp_path, program, options):
    arguments = ["--early_stop=3", *options, "--", *program, "--waits=9", "--rate=8,1,2,9,1.5"]
    result = run_sweep(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    runs = state(tmp_path / "sweep")
    assert {n for n, r in runs.items() if r["stopped_early"]} == {"rate=9"}
    assert runs["rate=9"]["exit_code"] == 143 and runs["rate=9"]["metrics"]["step"] == 2
    assert "rate=9 stopped early, " in result.stderr and "stopped early" in result.stdout
    second = run_sweep(arguments, tmp_path)  # the run is not repeated
    assert second.returncode == 0 and "5 runs, 5 already completed" in second.stderr


@pytest.mark.parametrize("code", [1, 0])
def test_a_run_that_fails_after_the_signal_of_the_median_rule_is_repeated(tmp_path, program, code):
    arguments = ["--early_stop=3", "--", *program, "--waits=9", f"--code={code}", "--rate=8,1,2,9,1.5"]
    result = run_sweep(arguments, tmp_path)
    assert result.returncode == code, result.stderr
    runs = state(tmp_path / "sweep")
    assert runs["rate=9"]["exit_code"] == code and not runs["rate=9"]["stopped_early"]
    assert ("failed: " in result.stderr) == bool(code) and "stopped early" not in result.stderr
    second = run_sweep(arguments, tmp_path)
    assert f"5 runs, {4 if code else 5} already completed" in second.stderr


def test_a_run_at_its_last_step_is_not_stopped_early(tmp_path, program):
    arguments = ["--early_stop=3", "--", *program, "--waits=9", "--at=3", "--rate=8,1,2,9,1.5"]
    result = run_sweep(arguments, tmp_path)
    assert result.returncode == 0 and "stopped early" not in result.stdout + result.stderr, result.stderr
    assert state(tmp_path / "sweep")["rate=9"] | {"settings": 0, "command_digest": 0} == {
        "settings": 0, "command_digest": 0, "exit_code": 0, "stopped_early": False,
        "metrics": {"step": 3, "loss": 3.0, "accuracy": -3.0},
    }  # fmt: skip


def test_a_run_that_receives_the_signal_before_its_last_step_and_completes_it_is_started_again(
    tmp_path, program
):
    arguments = ["--early_stop=3", "--", *program, "--waits=9", "--completes=1", "--rate=8,1,2,9,1.5"]
    result = run_sweep(arguments, tmp_path)
    assert result.returncode == 0 and "stopped early" not in result.stdout + result.stderr, result.stderr
    assert result.stderr.count("rate=9 started") == 2
    assert state(tmp_path / "sweep")["rate=9"]["exit_code"] == 0


def curve(*values, run="eval", first=1):
    other = "train" if run == "eval" else "eval"
    return {run: list(enumerate(values, first)), other: []}


def test_curves_are_read_from_metrics_files(tmp_path):
    rows = [{"step": 1, "run": "eval", "loss": 2.0}, {"step": 2, "run": "eval", "loss": "nan"},
            {"step": 1, "loss": 3}, {"step": 2, "run": "train", "loss": None}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step"')
    curves = median_rule.curves(tmp_path, "loss")
    assert curves["train"] == [(1, 3.0)] and curves["eval"][0] == (1, 2.0)
    assert math.isnan(curves["eval"][1][1])
    assert median_rule.curves(tmp_path / "nowhere", "loss") == {"eval": [], "train": []}


@pytest.mark.parametrize(
    ("running", "completed", "maximizes", "is_worse"),
    [
        (curve(3.0), [curve(1.0), curve(2.0), curve(9.0)], False, True),
        (curve(2.0), [curve(1.0), curve(2.0), curve(9.0)], False, False),  # equal to the median
        (curve(1.5, 9.0), [curve(2.0, 2.0)], False, False),  # the best value counts
        (curve(3.0), [curve(4.0, 1.0)], False, False),  # at the same step
        (curve(3.0, 3.0), [curve(4.0, 1.0)], False, True),
        (curve(3.0), [curve(1.0, first=5)], False, False),  # no value at this step
        (curve(3.0), [curve(4.0)], True, True),
        (curve(float("nan")), [curve(4.0)], False, True),
        (curve(float("nan")), [curve(float("nan"))], False, False),
        (curve(3.0, run="train"), [curve(1.0)], False, False),  # not comparable
        (curve(3.0, run="train"), [curve(1.0, run="train")], False, True),
        (curve(), [curve(1.0)], False, False),
        (curve(3.0), [], False, False),
    ],
)
def test_the_median_rule(running, completed, maximizes, is_worse):
    assert median_rule.is_worse_than_median(running, completed, maximizes=maximizes) is is_worse
