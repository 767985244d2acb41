"""Restoration with read errors: transient errors are retried, only wrong content is damage."""

import dataclasses
import errno
import functools
import os
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import ctl
import numpy as np
import pytest
from conftest import TIMEOUT_SECS
from ctl.checkpoints import commit, restoring
from ctl.checkpoints.protocol import Manifest
from ctl.distribute.topology import Topology
from ctl.errors import CheckpointError, ReadError, UsageError
from ctl.io import paths
from ctl.training.checkpointing import Checkpointing


@pytest.fixture
def directory(tmp_path):
    """Returns a directory with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        commit.write_checkpoint(tmp_path, Manifest(step=step, created=0.0), write)
    return tmp_path


def write(prefix):
    for part in ("index", "data-00000-of-00001"):
        with open(f"{prefix}.{part}", "wb") as file:
            file.write(b"tensors " * 100)


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    pauses, sleep = [], time.sleep

    def pause(secs):
        pauses.append(secs) if threading.current_thread() is threading.main_thread() else sleep(secs)

    monkeypatch.setattr(paths.time, "sleep", pause)
    return pauses


class FailingReads:
    """Replaces os.open and os.read; the first `times` accesses to paths with `ending` fail."""

    def __init__(self, monkeypatch, ending, times, number=None):
        self._ending, self._times, self._number = ending, times, number
        self._open, self._read = os.open, os.read
        self._empty_descriptors: set[int] = set()
        monkeypatch.setattr(paths.os, "open", self.open)
        monkeypatch.setattr(paths.os, "read", self.read)

    def open(self, path, *args):
        failing = str(path).endswith(self._ending) and self._times > 0
        self._times -= failing
        if failing and self._number:
            raise OSError(self._number, os.strerror(self._number), str(path))
        descriptor = self._open(path, *args)
        self._empty_descriptors.discard(descriptor)
        if failing:
            self._empty_descriptors.add(descriptor)
        return descriptor

    def read(self, descriptor, size):
        return b"" if descriptor in self._empty_descriptors else self._read(descriptor, size)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, None])
@pytest.mark.parametrize("ending", ["ckpt-2/manifest.json", "ckpt-2/state.index"])
def test_a_transient_error_is_retried(directory, monkeypatch, pauses, ending, number, caplog):
    FailingReads(monkeypatch, ending, 3, number)
    newest = restoring.newest_checkpoint(directory)
    assert newest.manifest.step == 2 and not newest.damaged
    assert pauses == [0.1, 0.2, 0.4]
    assert "Trying again in 0.1 s" in caplog.text and "damaged" not in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, None])
@pytest.mark.parametrize("ending", ["ckpt-2/manifest.json", "ckpt-2/state.index"])
def test_a_permanent_read_error_is_a_read_error_and_no_damage(directory, monkeypatch, ending, number):
    FailingReads(monkeypatch, ending, 10**6, number)
    with pytest.raises(ReadError, match="cannot be read") as raised:
        restoring.newest_checkpoint(directory)
    assert raised.value.exit_code == 134 and "damaged" not in str(raised.value)


def test_an_unreadable_old_checkpoint_is_no_error(directory, monkeypatch):
    FailingReads(monkeypatch, "ckpt-1/manifest.json", 10**6, errno.EIO)
    newest = restoring.newest_checkpoint(directory)
    assert newest.manifest.step == 2 and not newest.damaged, "damaged checkpoints are moved aside"


def test_a_run_whose_checkpoints_cannot_be_read_does_not_start_at_step_0(directory, monkeypatch):
    FailingReads(monkeypatch, "manifest.json", 10**6, errno.EIO)
    with pytest.raises(ReadError, match="cannot be read"):
        restoring.newest_checkpoint(directory)


class Agreement:
    """Sums over two workers, which are threads."""

    num_workers = 2

    def __init__(self):
        self._values, self._barrier = [], threading.Barrier(2, timeout=TIMEOUT_SECS)

    def sum(self, numbers):
        self._values.append(np.asarray(numbers, np.float64))
        self._barrier.wait()
        total = sum(self._values)
        if self._barrier.wait() == 0:
            self._values.clear()
        self._barrier.wait()
        return total


@pytest.mark.parametrize("failing", [0, 1])
def test_all_workers_exit_with_134_when_one_of_them_cannot_restore(failing):
    agreement = Agreement()

    class Manager(ctl.CheckpointManager):
        is_shared = True

        def __init__(self, worker):
            self.worker = worker

        def choose(self):
            return self.restore(None, 7) or 7

        def restore(self, state, step):
            if self.worker == failing:
                raise ReadError("ckpt-7 cannot be read.")

    def restored(worker):
        topology = Topology({"worker": ("a:1", "b:1")}, "worker", worker)
        world = types.SimpleNamespace(topology=topology, host_all_reduce=agreement)
        Checkpointing(ctl.Config(), world, None, Manager(worker), None, None).restore_newest()

    with ThreadPoolExecutor() as pool:
        errors = [job.exception(TIMEOUT_SECS) for job in [pool.submit(restored, i) for i in range(2)]]
    assert [e.exit_code for e in errors] == [134, 134]
    assert "ckpt-7 cannot be read" in str(errors[failing])
    assert f"Worker {failing} could not restore" in str(errors[1 - failing])


def test_a_chief_that_does_not_see_the_newest_checkpoint_refuses(directory, tmp_path):
    """Simulates a restart of the chief on another host with a model_dir that is not shared."""
    agreement = Agreement()

    def newest_steps(worker):
        topology = Topology({"worker": ("a:1", "b:1")}, "worker", worker)
        return restoring.newest_step_by_worker(agreement, topology, [tmp_path / "none", directory][worker])

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(newest_steps, i) for i in range(2)]
        assert [job.result(TIMEOUT_SECS) for job in jobs] == [[-1, 2], [-1, 2]]
    now_secs = [0.0]
    clock = {"clock": lambda: now_secs[0], "sleep": lambda secs: now_secs.append(now_secs.pop() + secs)}
    with pytest.raises(UsageError, match="chief finds no checkpoint in .*worker 1 at step 2.*same"):
        restoring.check_newest_is_visible(tmp_path / "none", [-1, 2], **clock)
    assert now_secs[0] >= restoring.VISIBILITY_TIMEOUT_SECS
    restoring.check_newest_is_visible(directory, [1, 2], **clock)  # the checkpoint is visible now
    restoring.check_newest_is_visible(tmp_path / "none", [-1, -1], **clock)


@pytest.mark.parametrize("name", ["manifest.json", "state.index"])
@pytest.mark.parametrize("content", [b"", None])
def test_a_damaged_checkpoint_is_skipped_and_its_cause_is_logged(directory, name, content, pauses, caplog):
    where = directory / "ckpt-2" / name
    where.unlink()
    if content is not None:
        where.write_bytes(content)
    newest = restoring.newest_checkpoint(directory)
    assert newest.manifest.step == 1 and not pauses
    [(path, cause)] = newest.damaged.items()
    assert path == where.parent and name in cause and cause in caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "state.index"])
def test_a_pipe_in_place_of_a_file_is_damage_and_does_not_hang(directory, name):
    where = directory / "ckpt-2" / name
    where.unlink()
    os.mkfifo(where)
    newest = restoring.newest_checkpoint(directory)
    assert newest.manifest.step == 1
    assert "not a" in newest.damaged[where.parent]
    damaged_path = commit.move_to_damaged(where.parent)
    assert (damaged_path / name).exists() and commit.list_checkpoints(directory)[-1][1].step == 1


def test_leftovers_that_cannot_be_read_are_not_deleted(directory, monkeypatch):
    (directory / "ckpt-2").rename(directory / "replaced-ckpt-2")
    with monkeypatch.context() as patch:
        FailingReads(patch, "replaced-ckpt-2/manifest.json", 10**6, errno.EIO)
        with pytest.raises(OSError, match="cannot be read"):
            commit.delete_leftovers(directory)
    assert restoring.newest_checkpoint(directory).manifest.step == 2


def test_a_transient_error_of_the_tensor_reader_is_retried(tmp_path, monkeypatch, pauses):
    import tensorflow as tf
    from small_models import Small

    def make_trainer():
        return Small(model_dir=str(tmp_path), writers=[])

    make_trainer().train(1)
    unknown = functools.partial(tf.errors.OpError, error_code=tf.errors.UNKNOWN)  # raised by the C++ reader
    read, failures = tf.train.Checkpoint.read, [unknown, tf.errors.OutOfRangeError]

    def read_or_fail(self, *arguments, **options):
        if failures:
            raise failures.pop()(None, None, "Input/output error")
        return read(self, *arguments, **options)

    monkeypatch.setattr(tf.train.Checkpoint, "read", read_or_fail)
    trainer = make_trainer()
    trainer.prepare()
    assert trainer.step == 1 and pauses == [0.1, 0.2]
    failures += [unknown] * 100
    with pytest.raises(ctl.CheckpointError, match="Input/output error") as raised:
        make_trainer().prepare()
    assert raised.value.exit_code == 134


def change_manifest(path, **fields):
    """Writes the manifest of a checkpoint with other values of some fields and their checksum."""
    manifest = dataclasses.replace(commit.read_manifest(path), **fields)
    (path / commit.MANIFEST).write_text(manifest.to_json())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 99}, "has format 99; this version of ctl reads up to .* a newer one"),
        ({"metrics": {"loss": 10**400}}, "invalid values of metrics"),
        ({"files": {}}, "the manifest lists no files"),
        ({"files": {"state.index": {"size": 800, "checksum": "md5:0"}}}, "state.index cannot be compared"),
        ({"files": {"..": {"size": 0, "checksum": "crc32:0"}}}, "is not a file|invalid values of files"),
    ],
)
def test_the_error_of_an_explicit_step_names_what_is_wrong(directory, fields, message):
    change_manifest(directory / "ckpt-2", **fields)
    with pytest.raises(CheckpointError, match=message):
        restoring.find_checkpoint(directory, 2)
    path, _ = restoring.find_checkpoint(directory, 1)
    assert path == directory / "ckpt-1"
