"""Promises 18 and 19: a checkpoint always exists, protected ones are kept, and deletions may fail."""

import contextlib
import subprocess

import pytest
from ctl.checkpoints import commit
from polling import wait_until
from saving_jobs import checkpoints, jobs, names  # noqa: F401

pytestmark = pytest.mark.workers


def test_another_process_always_reads_a_complete_checkpoint(jobs, tmp_path):  # noqa: F811
    """Reads the directory continuously while each step is saved and the previous one is deleted."""
    jobs.start(tmp_path, "--keep=1", "--save_every=1", "--steps=40", "--twice")
    directory = tmp_path / "checkpoints"
    listed_steps, num_reads = set(), 0
    try:
        wait_until(lambda: steps_of(directory))
        while jobs.is_busy():
            before, steps = names(directory), steps_of(directory)
            while not steps and names(directory) != before:  # renamed between the listing and the reading
                before, steps = names(directory), steps_of(directory)
            assert steps, before
            listed_steps |= set(steps)
            num_reads += 1
    finally:
        result = jobs.wait()
    assert result.code == 0, result.output
    assert len(listed_steps) > 5 and num_reads > 20 and names(directory) == ["ckpt-40"]


def steps_of(directory):
    return [m.step for _, m in commit.list_checkpoints(directory)]


def test_every_k_th_stays_across_restarts(jobs, tmp_path):  # noqa: F811
    for steps in (6, 13):
        assert jobs(tmp_path, "--keep=1,every=4", "--save_every=1", f"--steps={steps}").code == 0
    assert checkpoints(tmp_path) == [4, 8, 12, 13]


def test_a_deletion_that_fails_does_not_stop_training(jobs, tmp_path):  # noqa: F811
    """A mount in the way of a directory: it can be neither renamed nor deleted."""
    model_dir = tmp_path / "run"
    jobs.start(model_dir, "--keep=1", f"--signals={tmp_path}", faults="stop:after_step@3")
    wait_until((tmp_path / "stopped-3").exists)
    checkpoint = model_dir / "checkpoints" / "ckpt-2"
    mount = ["mount", "--bind", str(checkpoint), str(checkpoint)]
    with contextlib.suppress(OSError):
        mounted = subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode == 0
    (tmp_path / "go-3").touch()
    try:
        result = jobs.wait()
    finally:
        subprocess.run(["umount", "-l", str(checkpoint)], timeout=30, check=False, capture_output=True)
    if not mounted:
        pytest.skip("mount is refused")
    assert result.code == 0 and result.json["ended"] == 8, result.output
    assert f"Cannot delete the old checkpoint {checkpoint}" in result.output
    assert checkpoints(model_dir) == [2, 8]
    assert jobs(model_dir, "--keep=1", "--steps=9").code == 0
    assert checkpoints(model_dir) == [9]
