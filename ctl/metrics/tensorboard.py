"""TensorBoard event files, written by a thread of their own."""

import atexit
import collections
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from ctl.io import paths
from ctl.metrics.protocol import Ended, Event, MetricWriter, Saved, Shown, Started, Traced
from ctl.metrics.tensorboard_log import TensorBoardLog

_HEEDED = (Started, Traced, Saved, Ended, *get_args(Shown))
_STOP = object()
_LAST_SECS = 5.0  # for a disk that refuses at the end
_RETRY_SECS = 0.2
_log = logging.getLogger("ctl")


class TensorBoardWriter(MetricWriter):
    """Writes `logs_dir/train` and `logs_dir/eval`; the caller only puts things on a queue.

    `Started(step=k)` takes back what an earlier attempt wrote beyond step k, so a program that
    only adds to the same folder, such as an evaluator, must not send it. `Ended` waits until
    everything is on disk, at most `close_timeout_secs`. Nothing here raises or waits otherwise: while
    the disk refuses, entries wait and are tried again, with a warning at the beginning, and one at the
    end that says how many were dropped; if `queue_size` entries wait, new ones are dropped with one
    warning. `logs_dir` is a local or mounted path.
    """

    def __init__(
        self,
        logs_dir: str | os.PathLike[str],
        *,
        queue_size: int = 10_000,
        flush_every_secs: float = 2.0,
        close_timeout_secs: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._logs_dir = Path(logs_dir)
        self._queue_size = queue_size
        self._flush_every_secs = flush_every_secs
        self._close_timeout_secs = close_timeout_secs
        self._clock = clock
        self._queue: queue.Queue[Any] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._failed = False
        self._dropped = False
        self._in_trouble = False  # the disk refuses, for now
        self._lost = 0  # entries since then
        self._abandoned = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        numbers = {tag: float(value) for tag, value in values.items()}
        self._post((self._clock(), int(step), numbers, run))

    def note(self, event: Event) -> None:
        if type(event) not in _HEEDED:
            return
        if type(event) is Ended:
            self._close((self._clock(), event))
        else:
            self._post((self._clock(), event))

    def abandon(self) -> bool:
        """Discards the pending entries, as the directory now belongs to another job."""
        self._failed = self._abandoned = True
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self._close)
        return True

    def _post(self, item: tuple[Any, ...]) -> None:
        if self._failed:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self._dropped:
                self._dropped = True
                _log.warning(
                    "TensorBoard logs in %s: the disk is too slow, %d entries wait; new ones are "
                    "dropped until it catches up. Log less often, or to a faster disk.",
                    self._logs_dir,
                    self._queue_size,
                )

    def _start(self) -> None:
        self._queue = queue.Queue(self._queue_size)
        self._thread = threading.Thread(
            target=self._serve, args=(self._queue,), name="ctl-tensorboard", daemon=True
        )
        self._thread.start()
        atexit.register(self._close)  # for numbers written without or after `Ended`

    def _close(self, *last_items: Any) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._close)
        try:
            for item in (*last_items, _STOP):
                self._queue.put(item, timeout=self._close_timeout_secs)
            thread.join(self._close_timeout_secs)
        except queue.Full:
            pass
        if thread.is_alive():
            _log.warning(
                "TensorBoard logs in %s: still not written after %g s; the newest are lost.",
                self._logs_dir,
                self._close_timeout_secs,
            )

    def _serve(self, items: queue.Queue[Any]) -> None:
        log = TensorBoardLog(self._logs_dir, self._clock)
        waiting: collections.deque[tuple[Any, ...]] = collections.deque()
        try:
            self._write_until_stopped(log, items, waiting)
            if not self._abandoned:
                self._close_log(log, waiting)
        except Exception as error:
            self._failed = True
            _log.warning(
                "TensorBoard logs in %s cannot be written (%s: %s); training goes on without them.",
                self._logs_dir,
                type(error).__name__,
                error,
            )
            while not items.empty():  # so that `Ended` finds room and does not wait
                items.get_nowait()

    def _write_until_stopped(
        self, log: TensorBoardLog, items: queue.Queue[Any], waiting: collections.deque
    ) -> None:
        flush_at = time.monotonic()
        while True:
            try:
                item = items.get(timeout=self._flush_every_secs)
            except queue.Empty:
                item = None
            if item is _STOP or self._abandoned:
                return
            if item is not None and len(waiting) < self._queue_size:
                waiting.append(item)
            elif item is not None:
                self._lost += 1
            # a run that goes on from a checkpoint does not write the numbers before it again
            due = item is None or isinstance(item[1], Saved) or time.monotonic() >= flush_at
            if self._in_trouble and not due:
                continue
            self._written(log, waiting, flush=due)
            if due:
                flush_at = time.monotonic() + self._flush_every_secs

    def _written(self, log: TensorBoardLog, waiting: collections.deque, flush: bool) -> bool:
        """Writes what waits, and says when the disk begins to refuse, and when it no longer does."""
        try:
            if self._in_trouble:
                log.flush()
            while waiting:
                _apply(log, waiting[0])
                waiting.popleft()
            if flush:
                log.flush()
        except OSError as error:
            if paths.is_permanent_error(error):
                raise
            if not self._in_trouble:
                self._in_trouble = True
                _log.warning(
                    "TensorBoard logs in %s cannot be written for now (%s: %s); up to %d entries wait, "
                    "and are tried again.",
                    self._logs_dir,
                    type(error).__name__,
                    error,
                    self._queue_size,
                )
            return False
        if flush and self._in_trouble:
            self._in_trouble = False
            _log.warning(
                "TensorBoard logs in %s are written again; %d entries were dropped.",
                self._logs_dir,
                self._lost,
            )
            self._lost = 0
        return True

    def _close_log(self, log: TensorBoardLog, waiting: collections.deque) -> None:
        """Writes the rest; a disk that refuses is given some seconds."""
        until = time.monotonic() + min(self._close_timeout_secs / 2, _LAST_SECS)
        while not self._written(log, waiting, flush=True):
            if time.monotonic() >= until:
                _log.warning(
                    "TensorBoard logs in %s: %d entries are lost; the disk still refuses.",
                    self._logs_dir,
                    self._lost + len(waiting) or 1,
                )
                self._lost = 0
                return
            time.sleep(min(_RETRY_SECS, self._close_timeout_secs / 10))
        log.close()


def _apply(log: TensorBoardLog, item: tuple[Any, ...]) -> None:
    wall_time, what, *rest = item
    if isinstance(what, Started):
        log.start(what, wall_time)
    elif isinstance(what, Traced):
        log.trace(what, wall_time)
    elif isinstance(what, Shown):
        log.show(what, wall_time)
    elif isinstance(what, Ended):
        log.end(what, wall_time)
    elif not isinstance(what, Saved):
        log.scalars(wall_time, what, *rest)
