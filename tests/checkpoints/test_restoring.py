"""What cannot be read for a moment is read again; only what is wrong on the disk is damaged."""

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
from ctl.errors import ReadError, UsageError
from ctl.io import paths
from ctl.training.checkpointing import Checkpointing


@pytest.fixture
def directory(tmp_path):
    """Checkpoints of steps 1 and 2."""
    for step in (1, 2):
        commit.write_checkpoint(tmp_path, Manifest(step=step, created=0.0), write)
    return tmp_path


def write(prefix):
    for part in ("index", "data-00000-of-00001"):
        with open(f"{prefix}.{part}", "wb") as file:
            file.write(b"tensors " * 100)


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    pauses, sleep = [], time.sleep

    def pause(secs):
        pauses.append(secs) if threading.current_thread() is threading.main_thread() else sleep(secs)

    monkeypatch.setattr(paths.time, "sleep", pause)
    return pauses


class Failing:
    """Opens files; the first times that one whose path ends so is asked for, it fails."""

    def __init__(self, monkeypatch, ending, times, number=None):
        self._ending, self._times, self._number = ending, times, number
        self._open, self._read = os.open, os.read
        self._short: set[int] = set()
        monkeypatch.setattr(paths.os, "open", self.open)
        monkeypatch.setattr(paths.os, "read", self.read)

    def open(self, path, *how):
        failing = str(path).endswith(self._ending) and self._times > 0
        self._times -= failing
        if failing and self._number:
            raise OSError(self._number, os.strerror(self._number), str(path))
        descriptor = self._open(path, *how)
        self._short.discard(descriptor)
        if failing:
            self._short.add(descriptor)
        return descriptor

    def read(self, descriptor, size):
        return b"" if descriptor in self._short else self._read(descriptor, size)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, None])
@pytest.mark.parametrize("ending", ["ckpt-2/manifest.json", "ckpt-2/state.index"])
def test_an_error_that_passes_costs_nothing(directory, monkeypatch, slept, ending, number, caplog):
    Failing(monkeypatch, ending, 3, number)
    found = restoring.newest_checkpoint(directory)
    assert found.manifest.step == 2 and not found.damaged
    assert slept == [0.1, 0.2, 0.4]
    assert "Trying again in 0.1 s" in caplog.text and "damaged" not in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, None])
@pytest.mark.parametrize("ending", ["ckpt-2/manifest.json", "ckpt-2/state.index"])
def test_an_error_that_stays_is_worth_another_attempt_and_is_no_damage(
    directory, monkeypatch, ending, number
):
    Failing(monkeypatch, ending, 10**6, number)
    with pytest.raises(ReadError, match="cannot be read") as raised:
        restoring.newest_checkpoint(directory)
    assert raised.value.exit_code == 134 and "damaged" not in str(raised.value)


def test_an_old_one_that_cannot_be_read_does_not_matter(directory, monkeypatch):
    Failing(monkeypatch, "ckpt-1/manifest.json", 10**6, errno.EIO)
    found = restoring.newest_checkpoint(directory)
    assert found.manifest.step == 2 and not found.damaged, "damaged ones are set aside"


def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_at_step_0(directory, monkeypatch):
    Failing(monkeypatch, "manifest.json", 10**6, errno.EIO)
    with pytest.raises(ReadError, match="cannot be read"):
        restoring.newest_checkpoint(directory)


class Agreement:
    """Sums over two workers that are threads."""

    num_workers = 2

    def __init__(self):
        self._given, self._all = [], threading.Barrier(2, timeout=TIMEOUT_SECS)

    def sum(self, numbers):
        self._given.append(np.asarray(numbers, np.float64))
        self._all.wait()
        total = sum(self._given)
        if self._all.wait() == 0:
            self._given.clear()
        self._all.wait()
        return total


@pytest.mark.parametrize("failing", [0, 1])
def test_all_workers_end_alike_when_one_of_them_cannot_restore(failing):
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
        place = Topology({"worker": ("a:1", "b:1")}, "worker", worker)
        world = types.SimpleNamespace(topology=place, host_all_reduce=agreement)
        Checkpointing(ctl.Config(), world, None, Manager(worker), None, None).restore_newest()

    with ThreadPoolExecutor() as pool:
        errors = [job.exception(TIMEOUT_SECS) for job in [pool.submit(restored, i) for i in range(2)]]
    assert [e.exit_code for e in errors] == [134, 134]
    assert "ckpt-7 cannot be read" in str(errors[failing])
    assert f"Worker {failing} could not restore" in str(errors[1 - failing])


def test_a_chief_that_does_not_see_the_newest_checkpoint_refuses(directory, tmp_path):
    """As on another host than before, with a model_dir that is not shared."""
    agreement = Agreement()

    def seen(worker):
        place = Topology({"worker": ("a:1", "b:1")}, "worker", worker)
        return restoring.newest_step_by_worker(agreement, place, [tmp_path / "none", directory][worker])

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(seen, i) for i in range(2)]
        assert [job.result(TIMEOUT_SECS) for job in jobs] == [[-1, 2], [-1, 2]]
    now = [0.0]
    waiting = {"clock": lambda: now[0], "sleep": lambda secs: now.append(now.pop() + secs)}
    with pytest.raises(UsageError, match="chief finds no checkpoint in .*worker 1 at step 2.*same"):
        restoring.check_newest_is_visible(tmp_path / "none", [-1, 2], **waiting)
    assert now[0] >= restoring.VISIBILITY_TIMEOUT_SECS
    restoring.check_newest_is_visible(directory, [1, 2], **waiting)  # it has come to be seen
    restoring.check_newest_is_visible(tmp_path / "none", [-1, -1], **waiting)


@pytest.mark.parametrize("name", ["manifest.json", "state.index"])
@pytest.mark.parametrize("content", [b"", None])
def test_damage_is_passed_over_with_its_cause_and_at_once(directory, name, content, slept, caplog):
    where = directory / "ckpt-2" / name
    where.unlink()
    if content is not None:
        where.write_bytes(content)
    found = restoring.newest_checkpoint(directory)
    assert found.manifest.step == 1 and not slept
    [(path, cause)] = found.damaged.items()
    assert path == where.parent and name in cause and cause in caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "state.index"])
def test_a_pipe_in_place_of_a_file_is_damage_and_does_not_hang(directory, name):
    where = directory / "ckpt-2" / name
    where.unlink()
    os.mkfifo(where)
    found = restoring.newest_checkpoint(directory)
    assert found.manifest.step == 1
    assert "not a" in found.damaged[where.parent]
    aside = commit.move_to_damaged(where.parent)
    assert (aside / name).exists() and commit.list_checkpoints(directory)[-1][1].step == 1


def test_left_overs_are_not_swept_while_nobody_can_tell_what_they_are(directory, monkeypatch):
    (directory / "ckpt-2").rename(directory / "replaced-ckpt-2")
    with monkeypatch.context() as patch:
        Failing(patch, "replaced-ckpt-2/manifest.json", 10**6, errno.EIO)
        with pytest.raises(OSError, match="cannot be read"):
            commit.delete_leftovers(directory)
    assert restoring.newest_checkpoint(directory).manifest.step == 2


def test_tensors_that_cannot_be_read_for_a_moment_are_read_again(tmp_path, monkeypatch, slept):
    import tensorflow as tf
    from small_models import Small

    def make():
        return Small(model_dir=str(tmp_path), writers=[])

    make().train(1)
    unknown = functools.partial(tf.errors.OpError, error_code=tf.errors.UNKNOWN)  # of the reader in C++
    read, failures = tf.train.Checkpoint.read, [unknown, tf.errors.OutOfRangeError]

    def failing(self, *arguments, **options):
        if failures:
            raise failures.pop()(None, None, "Input/output error")
        return read(self, *arguments, **options)

    monkeypatch.setattr(tf.train.Checkpoint, "read", failing)
    trainer = make()
    trainer.prepare()
    assert trainer.step == 1 and slept == [0.1, 0.2]
    failures += [unknown] * 100
    with pytest.raises(ctl.CheckpointError, match="Input/output error") as raised:
        make().prepare()
    assert raised.value.exit_code == 134
