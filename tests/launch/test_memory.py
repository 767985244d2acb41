"""Out-of-memory kills: which ones the launcher considers as the cause of an end. The counters are files."""

import os

import pytest
from ctl.launch import memory
from ctl.launch.memory import Memory


class Group:
    """The counter of a control group."""

    def __init__(self, folder):
        self.path = folder / "memory.events"
        self.count_kills(0)

    def count_kills(self, count):
        self.path.write_text(f"low 0\noom {count}\noom_kill {count}\n")


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_control_groups", lambda pid: [tmp_path])
    return Group(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """The time of `ctl.launch.memory`, in seconds: a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def observed(group, clock):
    """Returns the memory of a process, read once."""
    observed = Memory(os.getpid())
    observed.read()
    return observed


@pytest.mark.parametrize("num_reads", [0, 1, 3])
def test_a_kill_is_the_cause_of_an_end_some_reads_later(observed, group, clock, num_reads):
    group.count_kills(1)
    for _ in range(num_reads):
        observed.read()
        clock[0] += 0.5
    assert "out of memory" in observed.describe_out_of_memory()


def test_a_kill_long_before_the_end_is_not_its_cause(observed, group, clock):
    group.count_kills(1)
    observed.read()
    clock[0] += 11.0
    observed.read()
    assert observed.describe_out_of_memory() == ""
    group.count_kills(2)
    assert "out of memory" in observed.describe_out_of_memory()


def test_kills_before_the_start_of_the_process_are_not_counted(group, clock):
    group.count_kills(7)
    observed = Memory(os.getpid())
    observed.read()
    assert observed.describe_out_of_memory() == ""
