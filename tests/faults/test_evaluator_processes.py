"""The evaluator in a separate process, beside a training that completes and one that is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from polling import wait_until
from test_lease import HOLDER_PROGRAM

pytestmark = pytest.mark.workers

LAUNCH = [sys.executable, "-m", "ctl.launch"]
MNIST = [sys.executable, "-m", "models.mnist", "--global_batch_size=32"]
CLUSTER = {"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}


def run(*command):
    return processes.run(command, env=environment(), cwd=ROOT)


def rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def numbers(path):
    evaluations = [row for row in rows(path) if row["run"] == "eval"]
    return [(row["step"], row["loss"], row["accuracy"]) for row in evaluations]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Returns the model_dir and the result of a job with an evaluator and a worker that also evaluates."""
    model_dir = tmp_path_factory.mktemp("launched") / "m"
    result = run(
        *LAUNCH, "--workers=1", "--evaluator", "--", *MNIST, f"--model_dir={model_dir}",
        "--train_steps=30", "--save_every_steps=10", "--eval_every_steps=10", "--export=none",
    )  # fmt: skip
    return model_dir, result


def test_an_evaluator_beside_a_worker_has_its_numbers_and_ends_with_it(launched):
    model_dir, result = launched
    assert result.returncode == 0, result.stderr
    inline, evaluations = (numbers(model_dir / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    assert [step for step, *_ in evaluations] == [10, 20, 30]
    for separate_row, inline_row in zip(evaluations, inline, strict=True):
        assert separate_row == pytest.approx(inline_row, abs=1e-6)
    log = (model_dir / "workers" / "evaluator_0.log").read_text()
    assert "the training has ended (done) at step 30" in log and "Traceback" not in log
    assert json.loads((model_dir / "LOCK").read_text())["state"] == "ended"
    steps = [p.name for p in sorted((model_dir / "checkpoints").iterdir())]
    assert steps == ["ckpt-10", "ckpt-20", "ckpt-30"]


@pytest.fixture
def start(tmp_path, launched):
    """Yields a model_dir with that job's checkpoints, and a function that starts an evaluator."""
    (tmp_path / "m").mkdir()
    os.symlink(launched[0] / "checkpoints", tmp_path / "m" / "checkpoints")
    started = []

    def begin(command, **streams):
        task = {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}}
        process = processes.start(
            command, env=environment(TF_CONFIG=json.dumps(task)), cwd=ROOT, text=True, **streams
        )
        started.append(process)
        return process

    yield tmp_path / "m", begin
    for process in started:
        process.kill()
        process.communicate(timeout=TIMEOUT_SECS)


def evaluator_beside_a_training(model_dir, begin):
    """Starts an evaluator, then a process that claims to train in the directory."""
    evaluator = begin(
        [*MNIST, f"--model_dir={model_dir}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    training = begin(
        [sys.executable, "-c", HOLDER_PROGRAM, str(model_dir / "LOCK"), "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert training.stdout.readline() == "held\n"
    return evaluator, training


def test_when_training_was_killed_the_rest_is_evaluated_and_the_exit_code_is_134(start):
    model_dir, begin = start
    evaluator, training = evaluator_beside_a_training(model_dir, begin)
    training.kill()  # long before the evaluator has imported TensorFlow
    out, _ = evaluator.communicate(timeout=TIMEOUT_SECS)
    assert evaluator.returncode == 134, out
    assert [step for step, *_ in numbers(model_dir / "evaluations.jsonl")] == [10, 20, 30]
    last_line = out.splitlines()[-1]
    assert f"process {training.pid}, died after step 7" in last_line
    assert last_line.endswith("All of its checkpoints are evaluated.")


def test_sigterm_ends_a_waiting_evaluator_with_143_and_loses_nothing(start):
    model_dir, begin = start
    evaluator, _ = evaluator_beside_a_training(model_dir, begin)
    evaluated_file = model_dir / "evaluated.json"
    wait_until(
        lambda: evaluated_file.exists() and len(json.loads(evaluated_file.read_text())["evaluated"]) == 3
    )
    evaluator.send_signal(signal.SIGTERM)
    out, _ = evaluator.communicate(timeout=TIMEOUT_SECS)
    assert evaluator.returncode == 143, out
    assert out.splitlines()[-1].startswith("Stopped by SIGTERM after 3 evaluations")


def test_a_chief_and_a_worker_train_in_step_and_an_evaluator_has_their_numbers(tmp_path):
    model_dir, logs = tmp_path / "m", tmp_path / "logs"
    program = str(ROOT / "tests" / "programs" / "roles.py")
    result = run(
        *LAUNCH, "--chief", "--workers=1", "--evaluator", f"--log_dir={logs}", "--",
        sys.executable, program, str(model_dir), "20",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    names = ("job_0", "job_1", "evaluator_0")
    chief, worker, evaluator = (last_json(logs / f"{name}.log") for name in names)
    assert (chief["workers"], worker["workers"], evaluator["workers"]) == (2, 2, 1)
    assert (chief["chief"], worker["chief"], evaluator["chief"]) == (True, False, False)
    assert chief["digest"] == worker["digest"] == evaluator["digest"]
    assert worker["eval"] == {} and list(evaluator["eval"]) == ["5", "10", "15", "20"]
    assert evaluator["eval"] == pytest.approx(chief["eval"], abs=1e-6)
    assert evaluator["numbers"] == {"eval_loss": evaluator["eval"]["20"]}
    remaining_names = sorted(p.name for p in (model_dir / "checkpoints").iterdir())
    assert remaining_names == ["ckpt-10", "ckpt-15", "ckpt-20", "ckpt-5"]


def last_json(path: Path) -> dict:
    lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
    assert lines, path.read_text()
    return json.loads(lines[-1])
