"""Promise 15: a disk that is full costs a checkpoint, not the run; but the end of a run must be saved."""

import re

import pytest
import small_disks
from polling import wait_until
from saving_jobs import checkpoints, jobs, names, unbroken  # noqa: F401

pytestmark = pytest.mark.workers
LARGE = "--width=1000"  # a state of 1 MB
TOO_SMALL = 300_000


@pytest.fixture
def small_disk(tmp_path):
    with small_disks.mounted(tmp_path / "disk", "4m") as directory:
        yield directory


@pytest.mark.parametrize("mode", ["at once", "in the background"])
def test_a_full_disk_stops_neither_training_nor_later_saves(jobs, small_disk, tmp_path, mode):  # noqa: F811
    model_dir, filler = small_disk / "run", small_disk / "filler"
    background = ["--background"] if mode != "at once" else []
    jobs.start(
        model_dir, LARGE, "--keep=2", *background, f"--signals={tmp_path}",
        faults="stop:after_step@3 stop:after_step@5",
    )  # fmt: skip
    wait_until((tmp_path / "stopped-3").exists)
    wait_until(lambda: checkpoints(model_dir) == [2])
    small_disks.fill(filler)
    (tmp_path / "go-3").touch()
    wait_until((tmp_path / "stopped-5").exists)
    assert checkpoints(model_dir) == [2]
    wait_until(lambda: names(model_dir / "checkpoints") == ["ckpt-2"])
    filler.unlink()
    (tmp_path / "go-5").touch()
    result = jobs.wait()
    assert result.code == 0 and result.json["ended"] == 8, result.output
    assert checkpoints(model_dir) == [6, 8]
    message = re.search(
        r"checkpoint of step 4 could not be written to (\S+): No space left on device\. It needs "
        r"([\d,]+) bytes, ([\d,]+) are free there\. The newest checkpoint is of step 2\..* Training "
        r"continues; the last save", result.output,
    )  # fmt: skip
    assert message, result.output
    assert message[1] == str(model_dir / "checkpoints" / "ckpt-4")
    assert int(message[2].replace(",", "")) > 1_000_000 > int(message[3].replace(",", ""))
    assert "Traceback" not in result.output


def test_a_full_disk_under_the_reports_does_not_stop_training(jobs, unbroken, small_disk, tmp_path):  # noqa: F811
    jobs.start(
        small_disk, "--save_every=0", f"--signals={tmp_path}",
        faults="stop:after_step@1 stop:after_step@7",
    )  # fmt: skip
    wait_until((tmp_path / "stopped-1").exists)
    small_disks.fill(small_disk / "filler")
    (tmp_path / "go-1").touch()
    wait_until((tmp_path / "stopped-7").exists)
    (small_disk / "filler").unlink()
    (tmp_path / "go-7").touch()
    result = jobs.wait()
    assert result.code == 0 and result.json["final"] == unbroken, result.output
    assert "No space left on device" in result.output and checkpoints(small_disk) == [8]


def test_a_file_that_may_not_grow_costs_one_checkpoint(jobs, tmp_path):  # noqa: F811
    result = jobs(tmp_path, LARGE, faults=f"limit:{TOO_SMALL}@4")
    assert result.code == 0 and result.json["ended"] == 8, result.output
    assert checkpoints(tmp_path) == [2, 6, 8]
    assert names(tmp_path / "checkpoints") == ["ckpt-2", "ckpt-6", "ckpt-8"]
    assert re.search(r"checkpoint of step 4 could not be written to \S+ckpt-4: .*It needs [\d,]+ "
                     r"bytes, [\d,]+ are free", result.output, re.DOTALL)  # fmt: skip


@pytest.mark.parametrize("mode", ["at once", "in the background"])
def test_a_run_whose_end_is_not_saved_does_not_end_well(jobs, tmp_path, mode):  # noqa: F811
    background = ["--background"] if mode != "at once" else []
    result = jobs(tmp_path, LARGE, *background, "--save_every=0", faults=f"limit:{TOO_SMALL}@8")
    assert result.code == 1 and "SaveError: The checkpoint of step 8" in result.json["error"]
    assert "There is no checkpoint yet" in result.json["error"] and checkpoints(tmp_path) == []
    next_result = jobs(tmp_path, LARGE, *background)
    assert next_result.code == 0 and next_result.json["began"] == 0


def test_by_choice_a_failed_save_ends_the_run(jobs, tmp_path):  # noqa: F811
    result = jobs(tmp_path, LARGE, "--on_error=raise", faults=f"limit:{TOO_SMALL}@4")
    assert result.code == 1 and "SaveError: The checkpoint of step 4" in result.json["error"]
    assert checkpoints(tmp_path) == [2]
