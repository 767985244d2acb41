"""Stacks of all threads."""

import gc
import itertools
import sys
import threading

from ctl.supervision.stacks import format_stacks


def describe_in_thread(function):
    """Returns the stacks while another thread waits in `function`, with its identifier."""
    is_waiting, may_end = threading.Event(), threading.Event()

    def hold():
        is_waiting.set()
        may_end.wait()

    thread = threading.Thread(target=function, args=(hold,))
    thread.start()
    is_waiting.wait()
    stacks = format_stacks()
    may_end.set()
    thread.join()
    return stacks, thread.ident


def stack_of(stacks, head):
    """Returns the lines of one thread."""
    lines = iter(stacks.splitlines())
    assert f"{head} (most recent call first):" in lines  # continues after it
    return list(itertools.takewhile(lambda line: line.startswith("  "), lines))


def outer(wait):
    inner(wait)


def inner(wait):
    wait()


def recurse(wait, depth=300):
    recurse(wait, depth - 1) if depth else wait()


def test_each_thread_has_its_calls_the_newest_first():
    stacks, thread_id = describe_in_thread(outer)
    names = [line.rpartition(" in ")[2] for line in stack_of(stacks, f"Thread {thread_id:#x}")]
    assert names[names.index("hold") :][:3] == ["hold", "inner", "outer"]
    line_number = inner.__code__.co_firstlineno + 1
    assert f'  File "{__file__}", line {line_number} in inner' in stacks


def test_the_main_thread_comes_first_also_among_many_threads():
    may_end = threading.Event()
    threads = [threading.Thread(target=may_end.wait) for _ in range(150)]
    for thread in threads:
        thread.start()
    stacks = format_stacks()
    may_end.set()
    for thread in threads:
        thread.join()
    assert stacks.startswith("Main thread (most recent call first):")
    names = [line.rpartition(" in ")[2] for line in stack_of(stacks, "Main thread")]
    assert names[:2] == ["format_stacks", "test_the_main_thread_comes_first_also_among_many_threads"]
    assert all(f"Thread {thread.ident:#x} (most recent call first):" in stacks for thread in threads)


def test_no_garbage_is_collected_while_python_holds_the_lock_of_its_threads(monkeypatch):
    """The destructor of a `tf.Graph` waits for that lock."""
    collects, read = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or read())
    format_stacks()
    assert collects == [False] and gc.isenabled()


def test_a_deep_recursion_is_cut():
    stacks, thread_id = describe_in_thread(recurse)
    lines = stack_of(stacks, f"Thread {thread_id:#x}")
    assert len(lines) == 101 and lines[-1] == "  ..." and lines[-2].endswith(" in recurse")
