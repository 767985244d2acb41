"""Heartbeats of a thread, and a reader that uses its own clock."""

import os
import threading

import pytest
from conftest import TIMEOUT_SECS
from ctl.supervision.beat_file import BeatFile, BeatReader, Beats, PollClock
from small_disks import fill, mounted


def test_beats_continue_until_they_are_stopped():
    beat_count, thread_names = threading.Semaphore(0), []

    def beat():
        thread_names.append(threading.current_thread().name)
        beat_count.release()

    beats = Beats(beat, secs=0.001, name="beating")
    beats.start()
    assert all(beat_count.acquire(timeout=TIMEOUT_SECS) for _ in range(3))
    beats.stop(wait=True)
    ended = len(thread_names)
    assert not any(t.name == "beating" for t in threading.enumerate()) and len(thread_names) == ended
    assert set(thread_names) == {"beating"}


def test_a_beat_that_returns_false_is_the_last():
    beats, thread_names = None, []
    beats = Beats(lambda: thread_names.append(1) or len(thread_names) < 3, secs=0.001, name="few")
    beats.start()
    beats._thread.join(TIMEOUT_SECS)
    assert len(thread_names) == 3


def test_a_reader_counts_from_the_last_change():
    time_secs = [100.0]
    reader = BeatReader(lambda: time_secs[0])
    time_secs[0] = 103.0
    assert reader.silent_secs == 3.0  # before the first read
    assert reader.read(b"a") and reader.silent_secs == 0.0
    time_secs[0] = 110.0
    assert not reader.read(b"a") and reader.silent_secs == 7.0
    assert reader.read(b"b") and reader.silent_secs == 0.0


def test_a_poll_clock_does_not_count_the_time_in_which_its_owner_was_stopped():
    time_secs = [100.0]
    clock = PollClock(max_poll_secs=2.0, clock=lambda: time_secs[0])
    reader = BeatReader(clock)
    for _ in range(4):
        time_secs[0] += 0.5
        reader.read(b"a")
    assert reader.silent_secs == 1.5
    time_secs[0] += 3600.0
    assert not reader.read(b"a") and reader.silent_secs == 3.5


def test_a_beat_file_is_overwritten_in_place_and_survives_its_deletion(tmp_path):
    path = tmp_path / "beats" / "job_0.json"
    file = BeatFile(path)
    with pytest.raises(FileNotFoundError):
        file.write("1")
    path.parent.mkdir()
    file.write("1")
    before = path.stat()
    file.write("22")
    after = path.stat()
    assert path.read_text().strip() == "22"
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    path.unlink()
    file.write("3")  # into the deleted file
    file.write("4")
    assert path.read_text().strip() == "4"


def test_a_full_disk_stops_no_beats(tmp_path):
    with mounted(tmp_path / "small", "1m") as disk:
        file = BeatFile(disk / "job_0.json")
        file.write("1")
        fill(disk / "filler")
        file.write("2")
        assert (disk / "job_0.json").read_text().strip() == "2"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_only_a_memory_file_of_a_launcher_is_written_through_proc(tmp_path):
    """The same file descriptor may refer to another file in another PID namespace."""
    with open(tmp_path / "precious", "w+b") as other:
        with pytest.raises(OSError, match="not the memory file"):
            BeatFile(f"/proc/{os.getpid()}/fd/{other.fileno()}").write("1")
        assert (tmp_path / "precious").read_bytes() == b""
