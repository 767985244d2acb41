"""Reports of errors in a user's step: an explanation, the user's source lines and the error."""

import sys

import ctl
import processes
import pytest
from conftest import PROGRAMS, environment, some_of
from step_mistakes import MISTAKES, trainer_class

LABEL_PATTERN = r"one integer per example, shape \[b\]\. The batch is .*labels\[:, 0\]"
ERROR_PATTERNS = {
    "width": r"another shape than it was built for\. The batch is float32 \(\d+, 5\), int64 \(\d+,\)",
    "one-hot": LABEL_PATTERN,
    "one-hot in Keras": LABEL_PATTERN,
    "labels [b, 1]": LABEL_PATTERN,
    "texts": "labels are strings.*StringLookup",
    "texts in Keras": "labels are strings.*StringLookup",
    "range": r"not a class number.*valid range of \[0, 2\)",
    "range in Keras": r"not a class number.*valid range of \[0, 2\)",
    "dictionary": r"reads batch\[\d\], and the batch is a dictionary with the keys 'image', 'label'",
    "no model": r"calls an object that is None\. Set self\.model",
    "condition": r"minimize\(\) is called within a condition.*when=step % 2 == 0",
    "log in a condition": r"log\('even'\) is called within a condition.*tf\.where",
    "mean": r"Leave out tf\.reduce_mean",
    "frozen": r"no trainable variables.*layer\.trainable",
    "no input shape": r"self\.model: the Dense layer 'late' has no variables yet.*keras\.Input\(shape\)",
    "new head": r"self\.model: the Dense layer 'late' has no variables yet.*self\.model\.build",
    "None": r"train_data yields float32 .*, int64 .*, None: one of its components is None",
    "unknown rank": r"unknown shape\. The batch is float32 <unknown>.*tf\.ensure_shape\(x, \[None, 4\]\)",
}


CASES = [(name, replicas) for name in ERROR_PATTERNS for replicas in (1, 2)]
FAST_CASES = [(name, 1) for name in ERROR_PATTERNS] + CASES[1:6:2]


@pytest.mark.parametrize("case", some_of(CASES, *FAST_CASES), ids=str)
def test_a_mistake_is_explained_with_the_line_of_the_user(case, two_replicas):
    name, num_replicas = case
    if (name, num_replicas) == ("unknown rank", 2):
        pytest.skip("rows of an unknown shape are refused earlier")
    strategy = two_replicas if num_replicas == 2 else "default"
    trainer = trainer_class(name)(strategy=strategy, global_batch_size=16, writers=[])
    with pytest.raises(ctl.UsageError, match=f"(?s){ERROR_PATTERNS[name]}") as raised:
        trainer.train(2)
    error_message = str(raised.value)
    assert len(error_message.splitlines()) <= 12, error_message
    assert "\x1b" not in error_message and "site-packages" not in error_message
    assert trainer.step == 0


def output_of(name, *flags):
    command = [sys.executable, str(PROGRAMS / "step_mistakes.py"), name, *flags]
    return processes.run(command, env=environment())


def test_an_error_of_the_user_is_shown_with_their_own_lines_only():
    program = output_of("raises", "--train_steps=2", "--global_batch_size=16")
    assert program.returncode == 1
    lines = program.stderr.splitlines()
    assert lines[0].startswith("Traceback of your code (--full_traceback or")
    assert 'raise RuntimeError("an error of the user")' in program.stderr
    assert lines[-2:] == [
        "RuntimeError: an error of the user",
        "The batch is float32 (16, 4), int64 (16,).",
    ]
    assert len(lines) <= 6, program.stderr
    script = output_of("raises")
    assert script.returncode == 1 and script.stderr.splitlines()[-2:] == lines[-2:]
    assert "site-packages" not in script.stderr and len(script.stderr.splitlines()) <= 10, script.stderr


def test_an_explained_error_ends_a_script_with_2_and_a_few_lines():
    script = output_of("width")
    assert script.returncode == 2 and "UsageError: A layer got an input" in script.stderr
    assert len(script.stderr.splitlines()) <= 14 and "\x1b" not in script.stderr, script.stderr


@pytest.mark.parametrize("option", ["flag", "variable"])
def test_all_frames_are_shown_on_request(option):
    flags = ["--train_steps=2", "--global_batch_size=16"] if option == "flag" else []
    command = [sys.executable, str(PROGRAMS / "step_mistakes.py"), "raises", *flags]
    variables = {} if option == "flag" else {"TF_CPP_MIN_LOG_LEVEL": "0"}
    command += ["--full_traceback"] if option == "flag" else []
    program = processes.run(command, env=environment(**variables))
    assert program.returncode == 1
    assert "Traceback (most recent call last)" in program.stderr and "site-packages" in program.stderr


def test_every_mistake_of_the_program_is_tested():
    assert {*ERROR_PATTERNS, "raises"} == {*MISTAKES}


@pytest.mark.workers
@pytest.mark.parametrize("name", ["width", "raises"])
def test_two_workers_print_the_report_once(name, tmp_path):
    launch = [sys.executable, "-m", "ctl", "launch", "--workers=2", "--"]
    program = [sys.executable, str(PROGRAMS / "step_mistakes.py"), name, f"--model_dir={tmp_path}"]
    flags = ["--train_steps=2", "--global_batch_size=16"]
    job = processes.run([*launch, *program, *flags], env=environment())
    output = job.stdout + job.stderr
    assert job.returncode == (2 if name == "width" else 1), output
    line = "self.model(batch[0], training=True)" if name == "width" else 'raise RuntimeError("an error of'
    assert output.count(line) == 1, output
    other = (tmp_path / "workers" / "job_1.log").read_text()
    assert line not in other
    assert "as on the chief, " in other or "error" not in other  # or the worker was ended before
