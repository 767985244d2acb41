"""Iterators are destroyed soon after their last use, several at a time, and few are left at any moment."""

import gc
import os
import threading
import time

import ctl
import pytest
import tensorflow as tf
from conftest import TIMEOUT_SECS
from ctl.data import iterator_release
from small_models import Small, examples


class Slow:
    """An object whose destructor waits for an event."""

    running, most, lock = 0, 0, threading.Lock()

    def __init__(self, event):
        self.event = event

    def __del__(self):
        with Slow.lock:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
        self.event.wait(TIMEOUT_SECS)
        with Slow.lock:
            Slow.running -= 1


@pytest.fixture
def release(monkeypatch):
    monkeypatch.setattr(iterator_release.exit_hook, "keep_alive", lambda *_, **__: None)
    monkeypatch.setattr(iterator_release, "_MAX_WAIT_SECS", 0.2)
    Slow.running = Slow.most = 0
    return iterator_release.IteratorRelease()


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_several_are_destroyed_at_a_time_and_others_wait(release):
    event = threading.Event()
    for _ in range(20):
        release.release(release.register(Slow(event)))
    wait_until(lambda: Slow.running == iterator_release._MAX_THREADS)
    assert len(release.unreleased()) == 20 - iterator_release._MAX_THREADS
    event.set()
    wait_until(lambda: not release.unreleased() and not Slow.running)
    assert Slow.most == iterator_release._MAX_THREADS


def test_registering_waits_while_many_are_left(release, monkeypatch):
    monkeypatch.setattr(iterator_release, "_MAX_WAIT_SECS", TIMEOUT_SECS)
    event, registered = threading.Event(), []

    def register():
        for _ in range(30):
            registered.append(release.register(Slow(event)))
            release.release(registered[-1])

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    wait_until(lambda: Slow.running == iterator_release._MAX_THREADS)
    thread.join(0.3)
    assert thread.is_alive() and len(registered) < 30
    event.set()
    thread.join(TIMEOUT_SECS)
    assert len(registered) == 30


def test_one_that_is_used_elsewhere_is_kept(release, monkeypatch):
    monkeypatch.setattr(iterator_release, "_DELAY_SECS", 0.0)
    event = threading.Event()
    event.set()
    used, unused = Slow(event), Slow(event)
    first, second = release.register(used), release.register(unused)
    del unused
    release.release(first)
    release.release(second)
    wait_until(lambda: len(release.unreleased()) == 1)
    assert release.unreleased() == [used]
    del used
    wait_until(lambda: not release.unreleased())


def test_the_end_of_the_process_waits_for_a_destructor_and_starts_none(release, monkeypatch):
    monkeypatch.setattr(iterator_release, "_DELAY_SECS", 0.0)
    event = threading.Event()
    release.release(release.register(Slow(event)))
    wait_until(lambda: Slow.running == 1)
    stopping = threading.Thread(target=release.stop, daemon=True)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    release.release(release.register(Slow(event)))
    event.set()
    stopping.join(TIMEOUT_SECS)
    assert not stopping.is_alive() and len(release.unreleased()) == 1


@pytest.mark.slow
def test_many_evaluations_leave_few_iterators_and_threads(two_replicas):
    class Evaluating(Small):
        def eval_data(self, batch_size):
            rows = tf.data.Dataset.from_tensor_slices(examples())
            return rows.map(lambda x, y: (x * 1.0, y), num_parallel_calls=2).batch(batch_size)

    trainer = Evaluating("module", strategy=two_replicas, writers=[])
    trainer.evaluate()
    of_other_tests = len(iterator_release.iterators.unreleased())
    before, most = len(os.listdir("/proc/self/task")), 0
    for _ in range(40):
        trainer.evaluate()
        most = max(most, len(iterator_release.iterators.unreleased()))
    most -= of_other_tests
    assert most <= iterator_release._MAX_THREADS + iterator_release._MAX_DELAYED + 4
    gc.collect()
    wait_until(lambda: len(iterator_release.iterators.unreleased()) <= of_other_tests + 3)
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before + 40)
    assert isinstance(trainer, ctl.Trainer)
