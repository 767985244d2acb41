"""No data are unpickled, no path leaves model_dir, and no secret is shown."""

import re

import ctl
import pytest
from conftest import ROOT
from ctl.distribute import job_fingerprint
from ctl.metrics.protocol import Ended, RunEnd
from training import output_of, run

# by a named argument; between a process and those it starts itself, through a closed directory
ASKED_FOR = {"ctl/hvd/objects.py", "ctl/hvd/packing.py", "ctl/launch/run_function.py"}
SOURCES = sorted((ROOT / "ctl").rglob("*.py")) + sorted((ROOT / "models").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_unpickles_or_runs_a_shell(path):
    text = path.read_text(encoding="utf-8")
    if str(path.relative_to(ROOT)) in ASKED_FOR:
        text = re.sub(r"\bpickle\b|allow_pickle=True", "", text)
    bad = r"\b(pickle|marshal|shelve|dill|joblib)\b|allow_pickle=True|shell=True|os\.system|yaml\.load\("
    assert not re.search(bad, text)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "x/y", ".."])
def test_an_example_that_is_shown_stays_within_the_logs(name, tmp_path):
    """Names of pictures and metrics are tags in a file, never paths."""
    writer = ctl.TensorBoardWriter(tmp_path / "logs")
    writer.write(1, {name: 1.0})
    writer.note(Ended(1, RunEnd.DONE))
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and "logs" not in p.parts]
    assert not outside and {p.name for p in tmp_path.iterdir()} <= {"logs"}


@pytest.mark.parametrize("name", ["api_key", "hf_token", "PASSWORD", "client_secret", "wandb_key"])
def test_a_secret_is_shown_as_one(name):
    shown = str(job_fingerprint.shown(name, "hunter2"))
    assert "hunter2" not in shown and "hidden" in shown
    assert job_fingerprint.shown("learning_rate", 0.1) == 0.1
    assert job_fingerprint.shown("max_tokens", 512) == 512


@pytest.mark.workers
def test_a_secret_flag_is_in_no_file_of_the_run(tmp_path):
    result = run(tmp_path / "run", "--api_token=hunter2", "--train_steps=2")
    assert result.code == 0, result.output[-2000:]
    files = [output_of(tmp_path / "run"), *(p for p in (tmp_path / "run").rglob("*") if p.is_file())]
    assert not [p for p in files if b"hunter2" in p.read_bytes()]
