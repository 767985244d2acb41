"""Origin of a run on TensorBoard's configuration card: the command and the commit."""

import os
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ctl.training import run_metadata
from small_models import Small

HPARAMS = {"dropout": 0.1, "flip": True, "api_key": "abc"}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a file that this process reports as its program."""
    path = tmp_path / "train.py"
    path.write_text("1\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", str(path), "--dropout=0.1", "two words"])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return path


def git(folder, *arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *name, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_command_can_be_pasted(program):
    assert run_metadata._origin(HPARAMS) == {"command": f"python {program} --dropout=0.1 'two words'"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m models.mnist --train_steps=5 --dropout 0.2", None),
        ("python -u train.py --noflip --model-dir=a --export= --mode eval", None),
        ("python t.py --token=abc --dropout=1", "python t.py --token=... --dropout=1"),
        ("python t.py --token abc def --dropout=1", "python t.py --token ... def --dropout=1"),
        ("python t.py --verbose --dropout=1 -k abc", "python t.py --verbose --dropout=1 -k abc"),
        ("python t.py -- --token abc", "python t.py -- --token ..."),
        ("python t.py --api_key=abc", "python t.py --api_key=..."),
        ("python t.py -password=abc -dropout=1", "python t.py -password=... -dropout=1"),
        ("python t.py -password abc", "python t.py -password ..."),
        ("python -Xdev t.py -dropout 1", None),
    ],
)
def test_values_of_flags_that_are_not_for_ctl_are_hidden(monkeypatch, command, expected):
    monkeypatch.setattr(sys, "orig_argv", command.split())
    assert run_metadata._origin(HPARAMS)["command"] == (expected or command)


def test_a_run_without_a_model_dir_has_no_origin(program, tmp_path):
    for model_dir, has_origin in [(None, False), (str(tmp_path / "run"), True)]:
        trainer = Small(strategy="default", writers=[], model_dir=model_dir)
        prepared = trainer._prepare_trainer()
        info = run_metadata.run_info(prepared, trainer._run_options, SimpleNamespace(description="10 rows"))
        assert ("command" in info.config) is has_origin


@pytest.mark.skipif(shutil.which("git") is None, reason="requires git")
def test_the_commit_and_whether_files_differ_from_it(program):
    git(program.parent, "init", "-q")
    git(program.parent, "add", "train.py")
    git(program.parent, "commit", "-q", "-m", "first")
    git(program.parent, "tag", "a-tag")
    commit = run_metadata._origin(HPARAMS)["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    program.write_text("2\n")
    assert run_metadata._origin(HPARAMS)["git_commit"] == f"{commit}-dirty"


@pytest.fixture
def many_open_files():
    """Opens more than 1024 files for a test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("fewer than 4096 open files allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in descriptors:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(shutil.which("git") is None, reason="requires git")
def test_the_commit_is_found_by_a_process_with_many_open_files(program, many_open_files):
    git(program.parent, "init", "-q")
    git(program.parent, "add", "train.py")
    git(program.parent, "commit", "-q", "-m", "first")
    assert len(run_metadata._origin(HPARAMS)["git_commit"]) == 40


def test_a_repository_that_does_not_answer_delays_no_run(program, tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(run_metadata, "_GIT_SECS", 0.1)
    assert "git_commit" not in run_metadata._origin(HPARAMS)


def test_the_command_of_tensorboard_is_a_path_if_it_is_not_on_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert run_metadata._tensorboard() == f"{tmp_path}/bin/python -m tensorboard.main"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tensorboard").write_text("")
    assert run_metadata._tensorboard() == "bin/tensorboard"
