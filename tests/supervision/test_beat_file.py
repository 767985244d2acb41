"""Beats from a thread, and a reader who goes by its own clock."""

import threading

from conftest import TIMEOUT_SECS
from ctl.supervision.beat_file import BeatReader, Beats


def test_beats_come_until_they_are_stopped():
    came, count = threading.Semaphore(0), []

    def beat():
        count.append(threading.current_thread().name)
        came.release()

    beats = Beats(beat, secs=0.001, name="beating")
    beats.start()
    assert all(came.acquire(timeout=TIMEOUT_SECS) for _ in range(3))
    beats.stop(wait=True)
    ended = len(count)
    assert not any(t.name == "beating" for t in threading.enumerate()) and len(count) == ended
    assert set(count) == {"beating"}


def test_a_beat_that_returns_false_is_the_last():
    beats, count = None, []
    beats = Beats(lambda: count.append(1) or len(count) < 3, secs=0.001, name="few")
    beats.start()
    beats._thread.join(TIMEOUT_SECS)
    assert len(count) == 3


def test_a_reader_counts_from_the_last_change():
    now = [100.0]
    reader = BeatReader(lambda: now[0])
    now[0] = 103.0
    assert reader.silent_secs == 3.0  # nothing was read yet
    assert reader.read(b"a") and reader.silent_secs == 0.0
    now[0] = 110.0
    assert not reader.read(b"a") and reader.silent_secs == 7.0
    assert reader.read(b"b") and reader.silent_secs == 0.0
