"""Background destruction of unused tf.data iterators.

The destructor of an iterator waits for tf.data's autotuning thread: as long as the pipeline has run, at
most a minute. The iterator holds threads and buffers until then. Daemon threads therefore run the
destructors, and `register` blocks while many iterators are waiting for destruction. An iterator that is in
use when the process ends is never destroyed; see `ctl.io.exit_hook` and decision 26.
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
_MAX_DELAYED = 4  # unused iterators; with more, the oldest are destroyed without the delay
_MAX_THREADS = 8  # destructors at the same time
_MAX_WAIT_SECS = 10.0  # of `register`
_EXIT_SECS = 75.0  # longest wait at the end of the process; tf.data sleeps for up to a minute


class IteratorRelease:
    """Registry that keeps each iterator until its owner is collected, then destroys it in a thread."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._iterators: dict[int, Any] = {}  # not destroyed yet
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be filled during a collection
        self._num_threads = 0  # that destroy an iterator
        self._num_unused = 0  # released iterators without other references, at the newest check
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def register(self, iterator: Any) -> int:
        """Stores `iterator`, and returns the key for `release`. Blocks while many are not destroyed yet."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._num_released() <= _MAX_THREADS, _MAX_WAIT_SECS
            )
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

    def stop(self) -> None:
        """Starts no further destructor, and waits for the running ones."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._num_threads, _EXIT_SECS)

    def _num_released(self) -> int:
        return self._released.qsize() + self._num_unused + self._num_threads

    def _run(self) -> None:
        released_at: dict[int, float] = {}  # time by key, of iterators that are not destroyed yet
        unused: list[int] = []
        while True:
            pause = _POLL_SECS if unused else _LONG_POLL_SECS
            try:
                key = self._released.get(timeout=pause if released_at else None)
                released_at[key] = time.monotonic()
                self._num_unused += 1
                continue
            except queue.Empty:
                pass
            # the table and the argument of getrefcount hold one reference each
            unused = [key for key in released_at if sys.getrefcount(self._iterators[key]) <= 2]
            for i, key in enumerate(unused):
                is_due = time.monotonic() - released_at[key] >= _DELAY_SECS
                if (is_due or len(unused) - i > _MAX_DELAYED) and self._destroy(key):
                    del released_at[key]
            with self._changed:
                self._num_unused = sum(key in released_at for key in unused)
                self._changed.notify_all()

    def _destroy(self, key: int) -> bool:
        """Starts a thread for the destructor; returns False if it cannot be started now."""
        with self._changed:
            if self._stopped or self._num_threads >= _MAX_THREADS:
                return False
            try:
                threading.Thread(target=self._drop, args=(key,), name="ctl-destroy", daemon=True).start()
            except RuntimeError:  # too many threads, or Python 3.12 after the end of the main thread
                return False
            self._num_threads += 1
        return True

    def _drop(self, key: int) -> None:
        self._iterators.pop(key)  # the last reference; the destructor does not hold the interpreter's lock
        with self._changed:
            self._num_threads -= 1
            self._changed.notify_all()


iterators = IteratorRelease()


def _replace_registry() -> None:
    """Replaces the registry: a forked child has no threads, and never destroys its parent's iterators."""
    global iterators  # noqa: PLW0603
    iterators = IteratorRelease()


os.register_at_fork(after_in_child=_replace_registry)
