"""Python stacks of all threads, for the output of a process that ends because it hangs.

`faulthandler.dump_traceback` may end the process with SIGSEGV in Python 3.12.0 to 3.12.7 and 3.13.0, and
omits the main thread if there are more than 100 threads. This module reads no files and waits for no lock.
"""

import gc
import itertools
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_MAX_CALLS = 100  # of each thread


def format_stacks() -> str:
    """Returns the stacks of all threads, the newest call first and the main thread first."""
    main_id = threading.main_thread().ident
    collects = gc.isenabled()
    gc.disable()  # in Python 3.10 and 3.11 the destructor of a tf.Graph would wait for a lock of this call
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    lines = []
    for thread_id, frame in sorted(frames.items(), key=lambda item: item[0] != main_id):
        name = "Main thread" if thread_id == main_id else f"Thread {thread_id:#x}"
        calls = list(itertools.islice(_describe_calls(frame), _MAX_CALLS + 1))
        lines += [f"{name} (most recent call first):", *calls[:_MAX_CALLS]]
        if len(calls) > _MAX_CALLS:
            lines.append("  ...")
    return "\n".join(lines)


def _describe_calls(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        frame = frame.f_back
