"""Workers choose the newest snapshot that all of them have, and send it to new workers."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from conftest import TIMEOUT_SECS
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.distribute.topology import Topology
from ctl.elastic.snapshots import Snapshots


class ThreadGroup:
    """A group of threads with the methods of `WorkerGroup` that `Snapshots` calls."""

    def __init__(self, rank):
        self.ranks = types.SimpleNamespace(rank=rank, size=1)
        self._shared = None

    def join(self, rank, size, shared):
        self.ranks, self._shared = types.SimpleNamespace(rank=rank, size=size), shared

    def exchange(self, row):
        return np.array(self._all(list(row)))

    def broadcast(self, name, array, root):
        return np.array(self._all(array)[root])

    def _all(self, value):
        values, barrier = self._shared
        values[self.ranks.rank] = value
        barrier.wait(TIMEOUT_SECS)
        result = [values[rank] for rank in range(self.ranks.size)]
        barrier.wait(TIMEOUT_SECS)
        return result


class Worker:
    """A worker with one variable, whose value is the step."""

    def __init__(self, rank):
        self.group = ThreadGroup(rank)
        step = tf.Variable(0, dtype=tf.int64)
        self.weight = tf.Variable(-1.0)
        state = TrackedState({"weight": self.weight}, step, Topology())
        self.snapshots = Snapshots(state, self.group)
        self.step = step

    def take(self, step):
        self.step.assign(step)
        self.weight.assign(float(step))
        self.snapshots.take(Manifest(step=step, created=0.0, state={"number": step}))


def share(workers):
    """Forms a group and calls `share` on all. Returns the steps of manifests and the weights."""
    shared = {}, threading.Barrier(len(workers))
    for rank, worker in enumerate(workers):
        worker.group.join(rank, len(workers), shared)
    with ThreadPoolExecutor(len(workers)) as pool:
        manifests = list(pool.map(lambda worker: worker.snapshots.share(), workers))
    weights = {float(worker.weight.numpy()) for worker in workers}
    return {None if m is None else m.state["number"] for m in manifests}, weights


@pytest.fixture
def workers():
    """Three workers with the snapshots 5 (confirmed) and 8; the first one is the chief and also has 9."""
    three = [Worker(rank) for rank in range(3)]
    for worker in three:
        worker.take(5)
        worker.snapshots.confirm()
        worker.take(8)
    three[0].snapshots.confirm()
    three[0].take(9)
    return three


def test_the_newest_snapshot_of_all_is_used_if_the_chief_remains(workers):
    assert share(workers[:2]) == ({8}, {8.0})


def test_a_confirmed_snapshot_is_used_if_the_chief_is_lost(workers):
    assert share(workers[1:]) == ({5}, {5.0})


def test_a_confirmation_by_one_worker_is_enough(workers):
    workers[2].snapshots.confirm()
    assert share(workers[1:]) == ({8}, {8.0})


def test_the_second_loss_of_a_chief_uses_the_state_of_the_first(workers):
    workers[2].snapshots.confirm()
    assert share(workers[1:]) == ({8}, {8.0})
    assert share(workers[2:]) == ({8}, {8.0})


def test_before_a_confirmation_the_first_snapshot_is_used():
    workers = [Worker(rank) for rank in range(3)]
    for worker in workers:
        worker.take(0)
    workers[2].take(4)
    assert share(workers[1:]) == ({0}, {0.0})


def test_a_new_worker_receives_the_state_of_another_one(workers):
    new = Worker(0)
    assert share([workers[1], new, workers[0]]) == ({8}, {8.0})
    assert share([new]) == ({8}, {8.0})


def test_the_state_of_an_agreement_is_a_snapshot_until_the_next_one(workers):
    assert not any(worker.snapshots.has_shared for worker in workers)
    share(workers)
    assert all(worker.snapshots.has_shared for worker in workers)
    workers[0].take(12)
    assert not workers[0].snapshots.has_shared


def test_before_the_first_snapshot_rank_0_broadcasts_its_variables():
    workers = [Worker(rank) for rank in range(2)]
    workers[0].weight.assign(7.0)
    assert share(workers) == ({None}, {7.0})
