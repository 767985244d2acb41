"""Release of tf.data iterators that are no longer used, in the background.

The destructor of an iterator can wait as long as the pipeline has run, up to a minute, for tf.data's
autotuning thread, and each iterator has threads and buffers until then. Daemon threads therefore run the
destructors, several at a time, and `register` waits while many iterators are left to destroy. An iterator
that is in use when the process ends is never destroyed; see `ctl.io.exit_hook` and decision 26.
"""

import itertools
import os
import queue
import sys
import threading
import time
from typing import Any

from ctl.io import exit_hook

_DELAY_SECS = 1.0  # a script that ends right after its training destroys no iterator
_POLL_SECS = 0.05
_LONG_POLL_SECS = 0.5  # while another object refers to each of the released iterators
_MOST_WAITING = 4  # more iterators are destroyed without the delay
_MOST_THREADS = 8  # destructors at the same time
_ROOM_SECS = 10.0  # the longest wait for room
_EXIT_SECS = 75.0  # the longest wait for a destructor at the end of the process: tf.data sleeps a minute


class IteratorRelease:
    """Keeps each registered iterator until its owner is collected, then destroys it in a thread."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._iterators: dict[int, Any] = {}  # that are not destroyed
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be filled during a collection
        self._threads = 0  # that destroy an iterator
        self._waiting = 0  # iterators without an owner, as of the newest look
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def register(self, iterator: Any) -> int:
        """Keeps `iterator`; returns the key for `release`. Waits while many are left to destroy."""
        self._wait_for_room()
        key = next(self._keys)
        self._iterators[key] = iterator
        if self._thread is None:
            exit_hook.keep_alive(self.unreleased, pause=self.stop)
            self._thread = threading.Thread(target=self._run, name="ctl-release-iterators", daemon=True)
            self._thread.start()
        return key

    def release(self, key: int) -> None:
        """Marks the iterator as unused. Takes no lock, so a garbage collection may call it."""
        self._released.put(key)

    def unreleased(self) -> list[Any]:
        """Returns the iterators that are not destroyed."""
        return list(self._iterators.values())

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + _ROOM_SECS
        with self._changed:
            while self._num_released() > _MOST_THREADS and not self._stopped:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break

    def stop(self) -> None:
        """Destroys no further iterator, and waits for the destructors that run."""
        deadline = time.monotonic() + _EXIT_SECS
        with self._changed:
            self._stopped = True
            while self._threads and self._changed.wait(max(0.0, deadline - time.monotonic())):
                pass

    def _num_released(self) -> int:
        return self._released.qsize() + self._waiting + self._threads

    def _run(self) -> None:
        waiting: dict[int, float] = {}  # key -> when it was released
        unused: list[int] = []
        while True:
            pause = _POLL_SECS if unused else _LONG_POLL_SECS
            try:
                key = self._released.get(timeout=pause if waiting else None)
                waiting[key] = time.monotonic()
                self._waiting += 1
                continue
            except queue.Empty:
                pass
            # the table and the argument of getrefcount hold one reference each
            unused = [key for key in waiting if sys.getrefcount(self._iterators[key]) <= 2]
            for i, key in enumerate(unused):
                is_due = time.monotonic() - waiting[key] >= _DELAY_SECS or len(unused) - i > _MOST_WAITING
                if is_due and self._destroy(key):
                    del waiting[key]
            with self._changed:
                self._waiting = sum(key in waiting for key in unused)
                self._changed.notify_all()

    def _destroy(self, key: int) -> bool:
        """Starts a thread for the destructor; returns False if all threads are busy."""
        with self._changed:
            if self._stopped or self._threads >= _MOST_THREADS:
                return False
            self._threads += 1
        holder = [self._iterators.pop(key)]
        threading.Thread(target=self._drop, args=(holder,), name="ctl-destroy", daemon=True).start()
        return True

    def _drop(self, holder: list[Any]) -> None:
        holder.clear()  # the last reference; the destructor does not hold the interpreter's lock
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()


iterators = IteratorRelease()


def _forget_threads() -> None:
    """A forked child has none of the threads; its parent's iterators are not destroyed."""
    global iterators  # noqa: PLW0603
    iterators = IteratorRelease()


os.register_at_fork(after_in_child=_forget_threads)
