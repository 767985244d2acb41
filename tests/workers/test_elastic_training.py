"""Elastic training with real processes: workers are killed and join, and training continues exactly."""

import functools
import re

import leaving_runs
import numpy as np
import processes
import pytest
import training
from conftest import PROGRAMS, ROOT, environment, some_of
from leaving_runs import FLAGS, check_is_exact, sizes_of

pytestmark = pytest.mark.workers


@pytest.fixture
def start(monkeypatch):
    """A function that runs an elastic job, and returns its result and its JSON lines."""
    return functools.partial(leaving_runs.run, monkeypatch)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The model_dir of a run on one device."""
    model_dir = tmp_path_factory.mktemp("unbroken") / "m"
    result = training.run(model_dir, *FLAGS)
    assert result.code == 0, result.output
    return model_dir


CASES = {
    "the chief": ("kill@13:0", 2),
    "another worker": ("kill@13:2", 2),
    "two at once": ("kill@13:1 kill@13:2", 1),
    "the chief and another": ("kill@13:0 kill@13:2", 1),
}


@pytest.mark.parametrize("case", some_of(sorted(CASES), "the chief"))
def test_the_remaining_workers_continue_in_the_same_processes(start, unbroken, tmp_path, case):
    faults, num_remaining = CASES[case]
    result, facts = start(tmp_path / "m", faults=faults, NEWCOMERS="wait")
    assert result.code == 0, result.output[-6000:]
    assert result.output.count("fault: kill at 13") == len(faults.split())
    check_is_exact(tmp_path / "m", unbroken)
    last_pids = {f["pid"] for f in facts if f.get("step") == training.STEPS}
    assert len(last_pids) == num_remaining and last_pids <= {f["pid"] for f in facts if f.get("step") == 1}
    assert sizes_of(facts) == [3, num_remaining] and "Collective ops" not in result.output
    traces = [f["pid"] for f in facts if "traced" in f]
    assert sorted(traces) == sorted(set(traces))  # the traced functions are used again


def test_batches_of_a_dataset_are_shared_exactly_by_the_remaining_workers(start, tmp_path):
    alone = training.command(tmp_path / "alone", *FLAGS)
    alone[1] = str(PROGRAMS / "leaving.py")
    expected = processes.run(alone, env=environment(DATASET="1"), cwd=ROOT)
    assert expected.returncode == 0, expected.stdout + expected.stderr
    result, facts = start(tmp_path / "m", faults="kill@13:1", NEWCOMERS="wait", DATASET="1")
    assert result.code == 0, result.output[-6000:]
    check_is_exact(tmp_path / "m", tmp_path / "alone")
    traces = [f["pid"] for f in facts if "traced" in f]
    assert sizes_of(facts) == [3, 2] and sorted(traces) == sorted(set(traces))


@pytest.mark.slow
def test_three_chiefs_in_a_row_are_replaced_without_gaps_in_the_metrics(start, unbroken, tmp_path):
    faults = "kill@9:0 kill@19:0 kill@29:0"
    result, facts = start(tmp_path / "m", workers="1:4", faults=faults, NEWCOMERS="wait")
    assert result.code == 0, result.output[-6000:]
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts) == [4, 3, 2, 1]


def test_losses_have_the_same_bits_while_the_number_of_workers_is_unchanged(start, tmp_path):
    whole, _ = start(tmp_path / "whole", workers="1:2")
    broken, facts = start(tmp_path / "broken", workers="1:2", faults="kill@21:1")
    assert (whole.code, broken.code) == (0, 0), broken.output[-6000:]
    first_step = min(f["step"] for f in facts if f.get("size") == 1)
    assert 0 < first_step <= 22
    expected, losses = training.trace(tmp_path / "whole"), training.trace(tmp_path / "broken")
    assert [losses[s] for s in range(1, first_step)] == [expected[s] for s in range(1, first_step)]


@pytest.mark.parametrize("count", some_of([2, 3], 3))
def test_a_new_worker_joins_and_receives_the_state(start, unbroken, tmp_path, count):
    result, facts = start(tmp_path / "m", workers=f"1:{count}", faults="kill@5:1", PAUSE_SECS="0.4")
    assert result.code == 0, result.output[-6000:]
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts) == [count, count - 1, count]
    last_pids, first_pids = ({f["pid"] for f in facts if f.get("step") == s} for s in (training.STEPS, 1))
    assert len(last_pids) == count and len(last_pids & first_pids) == count - 1
    traces = [f["pid"] for f in facts if "traced" in f]
    assert sorted(traces) == sorted(set(traces)) and last_pids < set(traces)


def test_evaluations_continue_after_a_loss(start, tmp_path):
    flags = ("--eval_every_steps=10", "--mode=train_and_eval")
    whole = training.run(tmp_path / "whole", *FLAGS, *flags, EVALUATES="1")
    result, _ = start(tmp_path / "m", *flags, faults="kill@19:0", EVALUATES="1")
    assert (whole.code, result.code) == (0, 0), result.output[-6000:]
    for run in ("train", "eval"):
        losses, expected = training.trace(tmp_path / "m", run), training.trace(tmp_path / "whole", run)
        assert list(losses) == list(expected)
        np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_the_others_continue(start, unbroken, tmp_path):
    launcher = ("--heartbeat_timeout_secs=5",)
    result, facts = start(tmp_path / "m", faults="stop@9:1", launcher=launcher)
    assert result.code == 0, result.output[-6000:]
    assert re.search(r"sent no heartbeat for \d+ s", result.output)
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts)[:2] == [3, 2]


@pytest.mark.slow
def test_sigterm_to_one_worker_saves_a_checkpoint_and_ends_the_job(start, tmp_path):
    result, _ = start(tmp_path / "m", workers="1:2", faults="term@9:1")
    assert result.code == 143, result.output[-6000:]
    assert training.saved(tmp_path / "m") == [9]


@pytest.mark.slow
def test_all_parts_of_a_step_are_exact_while_workers_leave_and_join(start, tmp_path):
    alone = training.command(tmp_path / "alone", *FLAGS)
    alone[1] = str(PROGRAMS / "leaving.py")
    result = processes.run(alone, env=environment(VARIED="1"), cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    faults = "kill@9:0 kill@14:3 kill@14:4"
    result, facts = start(tmp_path / "m", workers="1:5", faults=faults, VARIED="1", PAUSE_SECS="0.2")
    assert result.code == 0, result.output[-6000:]
    check_is_exact(tmp_path / "m", tmp_path / "alone")
    assert len(sizes_of(facts)) >= 3


def test_too_few_workers_end_with_134_after_the_timeout(start, tmp_path):
    options = {"workers": "2:2", "launcher": ("--elastic_timeout_secs=1",)}
    result, facts = start(tmp_path / "m", faults="kill@9:1", **options)
    assert result.code == 134, result.output[-6000:]
    assert "the job requires 2" in result.output and sizes_of(facts) == [2]


@pytest.mark.parametrize("flag", some_of(["--communication=ring", "--sync_every=4"], "--sync_every=4"))
def test_unsupported_flags_end_with_2_before_training(start, tmp_path, flag):
    result, facts = start(tmp_path / "m", flag, workers="1:2")
    assert result.code == 2 and not facts, result.output[-6000:]
    name, _, value = flag.removeprefix("--").partition("=")
    assert re.search(rf"error: {name} is '?{value}'?; expected .* with elastic='1:2'", result.output)
    assert not (tmp_path / "m" / "checkpoints").exists()
