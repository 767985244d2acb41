"""Metric writer for TensorBoard, with a background thread."""

import atexit
import collections
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

from ctl.io import paths
from ctl.metrics.event_files import import_file_system
from ctl.metrics.protocol import Ended, EvaluationSets, Event, MetricWriter, Saved, Shown, Started, Traced
from ctl.metrics.publishing import EVERY_SECS
from ctl.metrics.tensorboard_log import TensorBoardLog
from ctl.setting_values import WORKER_RANGE_VARIABLE, check_integer, check_type

_HANDLED_EVENTS = (Started, Traced, Saved, EvaluationSets, Ended, *get_args(Shown))
_STOP = object()
_LOCAL_FLUSH_SECS = 2.0
_CLOSE_RETRY_SECS = 5.0  # duration of retries if the disk fails at the end
_RETRY_SECS = 0.2
_log = logging.getLogger("ctl")


class TensorBoardWriter(MetricWriter):
    """Metric writer for TensorBoard.

    Calls put entries in a queue. A background thread writes them to `logs_dir/train` and `logs_dir/eval`.

    After `Started(step=k)`, TensorBoard hides the points of an earlier attempt after step k. A program that
    adds events to the same folder, such as an evaluator, must not send it. `Ended` blocks until all entries
    are on disk, at most `close_timeout_secs`. No other call blocks, and no call raises an error. While the
    disk fails, entries are pending and are retried. Warnings are logged at the first failure and at the
    next success, with the number of dropped entries. At most `queue_size` entries are pending.

    Args:
      logs_dir: A directory, or a URL that TensorFlow can write to, such as `gs://bucket/run/logs`.
      queue_size: Maximum number of pending entries.
      flush_every_secs: Interval at which pending events are written (seconds). None: 2, or 30 for a URL,
        because an object store uploads complete files.
      close_timeout_secs: Maximum wait at the end of a run (seconds).
      clock: Function that returns the Unix time (seconds).
    """

    def __init__(
        self,
        logs_dir: str | os.PathLike[str],
        *,
        queue_size: int = 10_000,
        flush_every_secs: float | None = None,
        close_timeout_secs: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._logs_dir = paths.path(logs_dir)
        check_type("flush_every_secs", flush_every_secs, float | None)
        check_type("close_timeout_secs", close_timeout_secs, float)
        self._queue_size = check_integer("queue_size", queue_size, 1)
        # in an elastic job less than the interval of snapshots, from which another worker continues the log
        local_secs = 0.25 if os.environ.get(WORKER_RANGE_VARIABLE) else _LOCAL_FLUSH_SECS
        default_secs = EVERY_SECS if paths.is_url(logs_dir) else local_secs
        self._flush_every_secs = default_secs if flush_every_secs is None else flush_every_secs
        self._close_timeout_secs = close_timeout_secs
        self._clock = clock
        self._queue: queue.Queue[Any] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._has_dropped = False
        self._is_failing = False  # True after a failed write
        self._num_dropped = 0  # entries since the first failure
        self._abandoned = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Queues scalars for the background thread."""
        numbers = {tag: float(value) for tag, value in values.items()}
        self._post((self._clock(), int(step), numbers, run))

    def note(self, event: Event) -> None:
        """Queues an event for the background thread, and waits for it at the end of a run."""
        if type(event) not in _HANDLED_EVENTS:
            return
        if type(event) is Ended:
            self._close((self._clock(), event))
        else:
            self._post((self._clock(), event))

    def abandon(self) -> bool:
        """Discards the pending entries, because the directory belongs to another job."""
        self._has_failed = self._abandoned = True
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self._close)
        return True

    def _post(self, item: tuple[Any, ...]) -> None:
        if self._has_failed:
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self._has_dropped:
                self._has_dropped = True
                _log.warning(
                    "TensorBoard logs in %s: the disk is too slow, and %d entries are pending. New "
                    "entries are dropped until it catches up. Log less often, or to a faster disk.",
                    self._logs_dir,
                    self._queue_size,
                )

    def _start(self) -> None:
        import_file_system()
        self._queue = queue.Queue(self._queue_size)
        self._thread = threading.Thread(
            target=self._run, args=(self._queue,), name="ctl-tensorboard", daemon=True
        )
        self._thread.start()
        atexit.register(self._close)  # for metrics without or after `Ended`

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
                "TensorBoard logs in %s: not completely written after %g s; the newest entries are lost.",
                self._logs_dir,
                self._close_timeout_secs,
            )

    def _run(self, items: queue.Queue[Any]) -> None:
        log = TensorBoardLog(self._logs_dir)
        pending: collections.deque[tuple[Any, ...]] = collections.deque()
        try:
            self._write_until_stopped(log, items, pending)
            if self._abandoned:
                log.discard()
                log.close()
            else:
                self._close_log(log, pending)
        except Exception as error:
            self._has_failed = True
            _log.warning(
                "TensorBoard logs in %s cannot be written (%s: %s); training continues without them.",
                self._logs_dir,
                type(error).__name__,
                error,
            )
            while not items.empty():  # so that `Ended` does not block
                items.get_nowait()

    def _write_until_stopped(
        self, log: TensorBoardLog, items: queue.Queue[Any], pending: collections.deque
    ) -> None:
        flush_at = time.monotonic()
        while True:
            try:
                item = items.get(timeout=self._flush_every_secs)
            except queue.Empty:
                item = None
            if item is _STOP or self._abandoned:
                return
            if item is not None and len(pending) < self._queue_size:
                pending.append(item)
            elif item is not None:
                self._num_dropped += 1
            # a run that is resumed from a checkpoint does not write the metrics before it again
            is_due = item is None or isinstance(item[1], Started | Saved) or time.monotonic() >= flush_at
            if self._is_failing and not is_due:
                continue
            self._write_pending(log, pending, flush=is_due)
            if is_due:
                flush_at = time.monotonic() + self._flush_every_secs

    def _write_pending(self, log: TensorBoardLog, pending: collections.deque, flush: bool) -> bool:
        """Writes pending entries, and logs the first failure and the next success.

        Returns:
          False if the write has failed and can be retried.
        """
        try:
            if self._is_failing:
                log.flush()
            while pending:
                _apply(log, pending[0])
                pending.popleft()
            if flush:
                log.flush()
        except OSError as error:
            if paths.is_permanent_error(error):
                raise
            if not self._is_failing:
                self._is_failing = True
                _log.warning(
                    "TensorBoard logs in %s cannot be written for now (%s: %s); up to %d entries are "
                    "kept and written later.",
                    self._logs_dir,
                    type(error).__name__,
                    error,
                    self._queue_size,
                )
            return False
        if flush and self._is_failing:
            self._is_failing = False
            _log.warning(
                "TensorBoard logs in %s are written again; %d entries were dropped.",
                self._logs_dir,
                self._num_dropped,
            )
            self._num_dropped = 0
        return True

    def _close_log(self, log: TensorBoardLog, pending: collections.deque) -> None:
        """Writes the remaining entries, and retries for some seconds."""
        deadline = time.monotonic() + min(self._close_timeout_secs / 2, _CLOSE_RETRY_SECS)
        while not self._write_pending(log, pending, flush=True):
            if time.monotonic() >= deadline:
                _log.warning(
                    "TensorBoard logs in %s: %d entries are lost, because the disk still fails.",
                    self._logs_dir,
                    self._num_dropped + len(pending) or 1,
                )
                self._num_dropped = 0
                return
            time.sleep(min(_RETRY_SECS, self._close_timeout_secs / 10))
        log.close()


def _apply(log: TensorBoardLog, item: tuple[Any, ...]) -> None:
    """Writes an entry: (time, event) or (time, step, values, run)."""
    wall_time, event, *metrics = item
    if isinstance(event, Started):
        log.start(event, wall_time)
    elif isinstance(event, Traced):
        log.trace(event, wall_time)
    elif isinstance(event, Shown):
        log.show(event, wall_time)
    elif isinstance(event, Ended):
        log.end(event, wall_time)
    elif isinstance(event, EvaluationSets):
        log.separate_sets(event.names)
    elif not isinstance(event, Saved):
        step, (values, run) = event, metrics
        log.scalars(wall_time, step, values, run)
