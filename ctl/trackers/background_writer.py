"""Base class of metric writers for experiment trackers, with a background thread."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ctl.metrics.protocol import Ended, Event, Exported, Joined, MetricWriter, RunEnd, Started
from ctl.setting_values import check_type

_QUEUE_SIZE = 10_000
_RETRY_SECS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # waits before the retries of a call; the last one repeats
_POLL_SECS = 0.05
_OPEN_FACTOR = 6.0  # of `close_secs`, for a tracker that has not answered its first call
_STOP = object()
_log = logging.getLogger("ctl")


class TrackerWriter(MetricWriter):
    """Base class of metric writers for experiment trackers.

    The methods of `MetricWriter` put calls in a queue. A background thread executes them, so a slow or
    unreachable server does not delay the training. A call that fails with a transient error is retried
    until the end of the run. A call that fails with another error is discarded; if it is `start_run` or
    `join_run`, all calls until the next run are discarded. Only the first failure logs a warning.

    `Ended` blocks until all calls are complete, at most `upload_secs`; if the newest call has failed, at
    most `close_secs`; if the tracker has not answered its first call, six times as long. After a signal it
    is at most `close_secs` in each case, because the platform kills the process after its grace period.

    A subclass defines the methods that the thread calls: `start_run`, `join_run`, `log_metrics`,
    `log_exports`, `end_run`, and optionally `is_transient`. Metrics have names such as "train/loss" and
    "eval/loss", or "eval/clean/loss" with several evaluation sets. Texts and images are ignored.

    Args:
      title: Name of the tracker for messages.
      close_secs: Maximum wait at the end of a run for a tracker that fails, and after a signal (seconds).
      upload_secs: Maximum wait at the end of a run for a tracker that answers (seconds).
    """

    def __init__(self, title: str, *, close_secs: float = 10.0, upload_secs: float = 600.0) -> None:
        self._title = title
        check_type("close_secs", close_secs, float)
        check_type("upload_secs", upload_secs, float)
        self._close_secs, self._upload_secs = close_secs, upload_secs
        self._queue: queue.Queue[object] = queue.Queue(_QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()  # ends the current thread
        self._has_warned = False
        self._is_connected = False  # True if the newest call has succeeded
        self._is_failing = False  # True if the newest call has failed

    def start_run(self, event: Started) -> None:
        """Creates the tracker's run with its parameters, or resumes the one with the same `run_id`."""
        raise NotImplementedError

    def join_run(self, event: Joined) -> None:
        """Opens the run of another process, to which this process adds metrics."""
        raise NotImplementedError

    def log_metrics(self, step: int, values: Mapping[str, float], unix_secs: float) -> None:
        """Adds metrics by full name. `unix_secs` is the Unix time of the call of `write` (seconds)."""
        raise NotImplementedError

    def log_exports(self, step: int, paths: Sequence[str]) -> None:
        """Uploads exported models: local files and directories, or URLs."""
        raise NotImplementedError

    def end_run(self, event: Ended) -> None:
        """Sets the status of the run, unless the run is of another process, and closes the connection."""
        raise NotImplementedError

    def is_transient(self, error: Exception) -> bool:
        """Returns True for an error after which a call is retried, such as a lost connection."""
        return isinstance(error, OSError)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Queues metrics for the background thread."""
        numbers = {f"{run}/{name}": float(value) for name, value in values.items()}
        unix_secs = time.time()
        self._post(lambda: self.log_metrics(int(step), numbers, unix_secs))

    def note(self, event: Event) -> None:
        """Queues an event for the background thread, and waits for it at the end of a run."""
        if isinstance(event, Started):
            self._open(lambda: self.start_run(event))
        elif isinstance(event, Joined):
            self._open(lambda: self.join_run(event))
        elif isinstance(event, Exported):
            self._post(lambda: self.log_exports(event.step, event.paths))
        elif isinstance(event, Ended):
            self._close(lambda: self.end_run(event), is_after_signal=event.end is RunEnd.SIGNAL)

    def abandon(self) -> bool:
        """Discards the pending calls, because another job continues the run."""
        self._cancelled.set()
        self._thread = None
        return True

    def _open(self, call: Callable[[], None]) -> None:
        """Starts the thread, or continues with the thread of this run after a roll-back."""
        if self._thread is not None:
            self._post(call)
            return
        self._queue, self._cancelled = queue.Queue(_QUEUE_SIZE), threading.Event()
        self._has_warned = self._is_connected = self._is_failing = False
        self._thread = threading.Thread(
            target=self._execute_calls,
            args=(call, self._queue, self._cancelled),
            name=f"ctl-{self._title.lower()}",
            daemon=True,
        )
        self._thread.start()

    def _post(self, call: object) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._warn_once(f"{_QUEUE_SIZE} calls are pending")

    def _close(self, call: Callable[[], None], *, is_after_signal: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        for item in (call, _STOP):
            _put_last(self._queue, item)
        start_secs = time.monotonic()
        while thread.is_alive():
            limit_secs = self._close_secs if self._is_failing else _OPEN_FACTOR * self._close_secs
            limit_secs = self._upload_secs if self._is_connected else limit_secs
            if is_after_signal:
                limit_secs = min(limit_secs, self._close_secs)
            if time.monotonic() - start_secs >= limit_secs:
                self._cancelled.set()
                self._warn_once("no answer")
                return
            thread.join(_POLL_SECS)

    def _execute_calls(
        self, open_call: Callable[[], None], items: queue.Queue[object], cancelled: threading.Event
    ) -> None:
        is_open = self._call(open_call, cancelled)
        while not cancelled.is_set():
            item = items.get()
            if item is _STOP:
                return
            if is_open and callable(item):
                self._call(item, cancelled)

    def _call(self, call: Callable[[], None], cancelled: threading.Event) -> bool:
        """Executes a call, and retries it after a transient error. Returns True if it has succeeded."""
        num_failures = 0
        while not cancelled.is_set():
            try:
                call()
                self._is_connected, self._is_failing = True, False
                return True
            except Exception as error:
                self._is_connected, self._is_failing = False, True
                self._warn_once(f"{type(error).__name__}: {_first_line(error)}")
                if not self.is_transient(error):
                    return False
            cancelled.wait(_RETRY_SECS[min(num_failures, len(_RETRY_SECS) - 1)])
            num_failures += 1
        return False

    def _warn_once(self, reason: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "%s failed (%s); training continues. Failed connections are retried until the end of the run; "
            "entries that are not sent by then are lost.",
            self._title,
            reason,
        )


def _put_last(items: queue.Queue[object], item: object) -> None:
    """Appends an item without waiting. If the queue is full, discards its oldest items."""
    while True:
        try:
            items.put_nowait(item)
            return
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                items.get_nowait()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
