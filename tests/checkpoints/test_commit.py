"""Atomic commits of checkpoints on disks and in object stores; damaged checkpoints are moved aside."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import ctl
import pytest
from ctl.checkpoints import checksums, commit
from ctl.checkpoints.retention import Keep
from ctl.io import paths

URL = "ram://tests"


class ProcessDied(BaseException):
    """Simulated death of the process. The tested code must not clean up afterwards."""


def manifest(step, **options):
    return ctl.Manifest(step=step, created=float(step), **options)


def writer(text="x" * 64):
    def write_state(prefix):
        for end in (".data-00000-of-00001", ".index"):
            paths.path(prefix + end).write_bytes(text.encode())

    return write_state


def complete_steps(directory):
    """Returns the steps of the listed checkpoints. All of them must be complete."""
    checkpoints = commit.list_checkpoints(directory)
    assert [commit.find_damage(path, m) for path, m in checkpoints] == [None] * len(checkpoints)
    return [m.step for _, m in checkpoints]


def names(directory):
    return sorted(p.name for p in directory.iterdir() if p.name != commit.LISTING)


@pytest.fixture(params=["disk", "mounted", "url"])
def directory(request, tmp_path, monkeypatch):
    """Yields a directory on a disk, in a mounted object store, or at a URL."""
    if request.param == "url":
        yield paths.path(f"{URL}/{tmp_path.name}") / "c"
        return
    if request.param == "mounted":
        monkeypatch.setenv(paths.STORES, str(tmp_path))
        monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("renamed"))
        monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("renamed"))
    assert paths.has_rename(tmp_path) == (request.param == "disk")
    (tmp_path / "run").mkdir()
    yield tmp_path / "run" / "c"


class FileOperations:
    """Calls `check` before each file operation and raises ProcessDied at the n-th one."""

    def __init__(self, monkeypatch, check, die_at=None):
        self.count = 0
        targets = [(Path, n) for n in ("rename", "unlink", "mkdir", "write_bytes")]
        targets += [(paths.UrlPath, n) for n in ("unlink", "mkdir", "write_bytes")]
        for owner, name in (*targets, (paths, "remove_tree"), (paths, "sync"), (shutil, "rmtree")):
            original = getattr(owner, name)

            def checked_operation(*arguments, _original=original, **options):
                self.count += 1
                check()
                if die_at is not None and self.count >= die_at:
                    raise ProcessDied
                return _original(*arguments, **options)

            monkeypatch.setattr(owner, name, checked_operation)


def test_at_every_moment_there_is_a_complete_checkpoint_with_keep_1(directory, monkeypatch):
    manager = ctl.ChiefOnlyCheckpoints(str(directory), keep=Keep(newest=1))
    commit.write_checkpoint(directory, manifest(1), writer())
    observed_steps = []
    operations = FileOperations(monkeypatch, lambda: observed_steps.append(complete_steps(directory)))
    for step in (2, 2, 3):  # the second save of step 2 replaces the first
        metrics = {"n": len(observed_steps)}
        commit.write_checkpoint(directory, manifest(step, metrics=metrics), writer(str(step) * 99))
        manager._delete_surplus()
    assert operations.count > 15 and all(observed_steps)
    assert complete_steps(directory) == [3] and names(directory) == ["ckpt-3"]


def test_a_process_that_dies_at_any_operation_leaves_a_complete_checkpoint(directory, monkeypatch):
    """Dies at the first file operation, then at the second, and so on until the save completes."""
    for number in range(1, 200):
        with monkeypatch.context() as patch:
            shutil.rmtree(directory) if isinstance(directory, Path) and directory.exists() else None
            for path, _ in commit.list_checkpoints(directory):
                commit.discard_directory(path)
            commit.write_checkpoint(directory, manifest(1), writer())
            FileOperations(patch, lambda: None, die_at=number)
            patch.setattr(commit, "discard_directory", without_cleanup(commit.discard_directory))
            try:
                for step in (1, 2):
                    new = manifest(step, metrics={"new": 1.0})
                    commit.write_checkpoint(directory, new, writer("y" * 70))
                    for path, m in commit.list_checkpoints(directory):
                        if m.step < step:
                            commit.remove_checkpoint(path)
                is_complete = True
            except ProcessDied:
                is_complete = False
        steps = complete_steps(directory)
        assert steps in ([1], [1, 2], [2]), number
        commit.delete_leftovers(directory)
        assert complete_steps(directory) == steps
        assert set(names(directory)) == {f"ckpt-{step}" for step in steps}, number
        if is_complete:
            return
    pytest.fail("no save completed")


def without_cleanup(discard):
    """Returns a wrapper of `discard` that does not clean up after ProcessDied."""
    import sys

    def discard_unless_dead(path, ignore_errors=True):
        if not isinstance(sys.exc_info()[1], ProcessDied):
            discard(path, ignore_errors)

    return discard_unless_dead


def test_a_save_that_fails_leaves_the_older_checkpoints_and_no_directory_of_its_own(directory):
    def fail(prefix):
        writer()(prefix)
        raise OSError("no space")

    commit.write_checkpoint(directory, manifest(1), writer())
    with pytest.raises(OSError, match="no space"):
        commit.write_checkpoint(directory, manifest(2), fail)
    assert complete_steps(directory) == [1] and names(directory) == ["ckpt-1"]


def test_in_an_object_store_a_directory_without_its_marker_is_never_listed(directory, monkeypatch):
    commit.write_checkpoint(directory, manifest(1), writer())
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_manifest", lambda *_: (_ for _ in ()).throw(ProcessDied))
        patch.setattr(commit, "discard_directory", without_cleanup(commit.discard_directory))
        with pytest.raises(ProcessDied):
            commit.write_checkpoint(directory, manifest(2), writer())
    assert complete_steps(directory) == [1]
    in_place = not paths.has_rename(directory)
    assert ("ckpt-2" in names(directory)) == in_place
    assert commit.survey_checkpoints(directory)[1] == {}  # incomplete, not damaged
    assert len(commit.delete_leftovers(directory)) == 1 and names(directory) == ["ckpt-1"]


def test_a_delete_in_an_object_store_removes_the_marker_first(directory, monkeypatch):
    commit.write_checkpoint(directory, manifest(1), writer())
    observed_steps = []
    monkeypatch.setattr(paths, "remove_tree", lambda path: observed_steps.append(complete_steps(directory)))
    commit.remove_checkpoint(directory / "ckpt-1")
    assert observed_steps == [[]]


def test_a_damaged_checkpoint_is_moved_to_an_unused_name(directory):
    for number in range(3):
        commit.write_checkpoint(directory, manifest(7), writer(str(number) * 9))
        commit.move_to_damaged(directory / "ckpt-7")
        assert complete_steps(directory) == []
    damaged_directory = directory / commit.DAMAGED
    assert names(damaged_directory) == ["ckpt-7", "ckpt-7-1", "ckpt-7-2"]
    data = [(damaged_directory / n / "state.index").read_bytes() for n in names(damaged_directory)]
    assert data == [str(number).encode() * 9 for number in range(3)]


def test_checksums_of_earlier_checkpoints_are_still_compared(directory):
    commit.write_checkpoint(directory, manifest(3), writer("abc"))
    path = directory / "ckpt-3" / commit.MANIFEST
    content = json.loads(path.read_bytes())
    assert content["files"]["state.index"] == {"size": 3, "checksum": "crc32c:364b3fb7"}
    assert content.pop("checksum").startswith("crc32c:")
    for entry in content["files"].values():
        entry["checksum"] = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    text = json.dumps(content, sort_keys=True)
    content["checksum"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    path.unlink()
    path.write_bytes(json.dumps(content).encode())
    assert complete_steps(directory) == [3]
    (directory / "ckpt-3" / "state.index").unlink()
    (directory / "ckpt-3" / "state.index").write_bytes(b"abd")
    [(path_of_damaged, read_manifest)] = commit.list_checkpoints(directory)
    assert "does not have the checksum" in commit.find_damage(path_of_damaged, read_manifest)
    with pytest.raises(ValueError, match="unknown checksum algorithm 'md5'"):
        checksums.compute_checksum([b""], "md5:0")


def test_a_failing_delete_is_a_warning(directory, monkeypatch, caplog):
    for step in (1, 2, 3):
        commit.write_checkpoint(directory, manifest(step), writer())
    manager = ctl.ChiefOnlyCheckpoints(str(directory), keep=Keep(newest=1))

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "remove_checkpoint", refuse)
    manager._delete_surplus()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2 and "Cannot delete the old checkpoint" in warnings[0]
    assert complete_steps(directory) == [1, 2, 3]


def test_checkpoints_that_another_job_has_taken_over_are_not_changed(directory):
    commit.write_checkpoint(directory, manifest(4), writer("theirs"))
    manager = ctl.ChiefOnlyCheckpoints(str(directory))

    def raise_lease_lost():
        raise ctl.errors.LeaseLostError("taken over")

    def write_into_deleted_directory(prefix):  # another job has deleted the directory
        raise FileNotFoundError(prefix)

    manager.fence(raise_lease_lost)
    for action in (
        lambda: manager._commit(manifest(4), writer("mine"), 0),
        lambda: manager._commit(manifest(5), writer("mine"), 0),
        lambda: manager._commit(manifest(5), write_into_deleted_directory, 0),
        lambda: manager.amend(4, {"loss": 1.0}, {}),
    ):
        with pytest.raises(ctl.errors.LeaseLostError):
            action()
    assert complete_steps(directory) == [4] and names(directory) == ["ckpt-4"]
    assert (directory / "ckpt-4" / "state.index").read_bytes() == b"theirs"
    assert not commit.read_manifest(directory / "ckpt-4").metrics


def test_two_jobs_that_save_one_step_do_not_break_each_other_s_saves(tmp_path):
    first, second = (ctl.ChiefOnlyCheckpoints(tmp_path / "c") for _ in range(2))

    def write_during_other_save(prefix):
        writer("first")(prefix)
        second._commit(manifest(2), writer("second"), 0)

    first._commit(manifest(2), write_during_other_save, 0)
    assert complete_steps(tmp_path / "c") == [2] and names(tmp_path / "c") == ["ckpt-2"]
    assert (tmp_path / "c" / "ckpt-2" / "state.index").read_bytes() == b"first"


def test_a_url_is_no_local_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = paths.path("ram://tests-names/a") / "b"
    assert (str(path), path.name, str(path.parent)) == (
        "ram://tests-names/a/b", "b", "ram://tests-names/a"
    )  # fmt: skip
    for action in (path.read_bytes, path.unlink, path.stat, lambda: list(path.iterdir())):
        with pytest.raises(FileNotFoundError):
            action()
    path.unlink(missing_ok=True)
    assert not path.exists() and not path.is_file() and paths.free_bytes(path) is None
    assert list(tmp_path.iterdir()) == []
    assert paths.free_bytes(tmp_path / "not" / "there") > 0
    assert paths.has_rename(tmp_path) and not paths.has_rename(path)
    assert not paths.has_rename(paths.path("/gcs/bucket/run"))


def test_every_k_th_checkpoint_is_kept(directory):
    manager = ctl.ChiefOnlyCheckpoints(str(directory), keep=Keep.parse("1,best=loss,every=4"))
    for step in range(1, 11):
        loss = float("nan") if step == 10 else abs(step - 3.0)
        commit.write_checkpoint(directory, manifest(step, metrics={"loss": loss}), writer())
        manager._delete_surplus()
    assert manager.steps() == [3, 4, 8, 10]
    restarted = ctl.ChiefOnlyCheckpoints(str(directory), keep=manager.keep)  # simulates a restart
    commit.write_checkpoint(directory, manifest(11, metrics={"loss": 0.5}), writer())
    restarted._delete_surplus()
    assert restarted.steps() == [3, 4, 8, 11]
