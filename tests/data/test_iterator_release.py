"""Destruction of iterators in a few threads soon after their last use."""

import gc
import os
import threading

import ctl
import pytest
import tensorflow as tf
from conftest import TIMEOUT_SECS
from ctl.data import iterator_release
from polling import wait_until
from small_models import Small, examples


class SlowDestructor:
    """An object with a destructor that waits for an event."""

    running, max_running, lock = 0, 0, threading.Lock()

    def __init__(self, event):
        self.event = event

    def __del__(self):
        with SlowDestructor.lock:
            SlowDestructor.running += 1
            SlowDestructor.max_running = max(SlowDestructor.max_running, SlowDestructor.running)
        self.event.wait(TIMEOUT_SECS)
        with SlowDestructor.lock:
            SlowDestructor.running -= 1


@pytest.fixture
def release(monkeypatch):
    monkeypatch.setattr(iterator_release.exit_hook, "keep_alive", lambda *_, **__: None)
    monkeypatch.setattr(iterator_release, "_MAX_WAIT_SECS", 0.2)
    SlowDestructor.running = SlowDestructor.max_running = 0
    return iterator_release.IteratorRelease()


def test_several_objects_are_destroyed_at_a_time_and_others_wait(release):
    event = threading.Event()
    for _ in range(20):
        release.release(release.register(SlowDestructor(event)))
    wait_until(lambda: SlowDestructor.running == iterator_release._MAX_THREADS)
    assert len(release.unreleased()) == 20 - iterator_release._MAX_THREADS
    event.set()
    wait_until(lambda: not release.unreleased() and not SlowDestructor.running)
    assert SlowDestructor.max_running == iterator_release._MAX_THREADS


def test_registering_waits_while_many_are_left(release, monkeypatch):
    monkeypatch.setattr(iterator_release, "_MAX_WAIT_SECS", TIMEOUT_SECS)
    event, registered = threading.Event(), []

    def register():
        for _ in range(30):
            registered.append(release.register(SlowDestructor(event)))
            release.release(registered[-1])

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    wait_until(lambda: SlowDestructor.running == iterator_release._MAX_THREADS)
    thread.join(0.3)
    assert thread.is_alive() and len(registered) < 30
    event.set()
    thread.join(TIMEOUT_SECS)
    assert len(registered) == 30


def test_an_object_with_other_references_is_kept(release, monkeypatch):
    monkeypatch.setattr(iterator_release, "_DELAY_SECS", 0.0)
    event = threading.Event()
    event.set()
    used, unused = SlowDestructor(event), SlowDestructor(event)
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
    release.release(release.register(SlowDestructor(event)))
    wait_until(lambda: SlowDestructor.running == 1)
    stopping_thread = threading.Thread(target=release.stop, daemon=True)
    stopping_thread.start()
    stopping_thread.join(0.2)
    assert stopping_thread.is_alive()
    release.release(release.register(SlowDestructor(event)))
    event.set()
    stopping_thread.join(TIMEOUT_SECS)
    assert not stopping_thread.is_alive() and len(release.unreleased()) == 1


def test_an_object_is_destroyed_later_if_no_thread_can_be_started_now(release, monkeypatch):
    """Python 3.12 starts none after the end of the main thread."""
    monkeypatch.setattr(iterator_release, "_DELAY_SECS", 0.0)
    event = threading.Event()
    event.set()
    num_refused, start = [0], threading.Thread.start

    def start_or_refuse(thread):
        if thread.name == "ctl-destroy" and num_refused[0] < 3:
            num_refused[0] += 1
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    unused = SlowDestructor(event)
    key = release.register(unused)
    del unused
    release.release(key)
    wait_until(lambda: num_refused[0] == 1)
    assert len(release.unreleased()) == 1
    wait_until(lambda: not release.unreleased())
    assert num_refused[0] == 3
    release.stop()


@pytest.mark.slow
def test_many_evaluations_leave_few_iterators_and_threads(two_replicas):
    class Evaluating(Small):
        def eval_data(self, batch_size):
            rows = tf.data.Dataset.from_tensor_slices(examples())
            return rows.map(lambda x, y: (x * 1.0, y), num_parallel_calls=2).batch(batch_size)

    trainer = Evaluating("module", strategy=two_replicas, writers=[])
    trainer.evaluate()
    num_of_other_tests = len(iterator_release.iterators.unreleased())
    before, max_unreleased = len(os.listdir("/proc/self/task")), 0
    for _ in range(40):
        trainer.evaluate()
        max_unreleased = max(max_unreleased, len(iterator_release.iterators.unreleased()))
    max_unreleased -= num_of_other_tests
    assert max_unreleased <= iterator_release._MAX_THREADS + iterator_release._MAX_DELAYED + 4
    gc.collect()
    wait_until(lambda: len(iterator_release.iterators.unreleased()) <= num_of_other_tests + 3)
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before + 40)
    assert isinstance(trainer, ctl.Trainer)
