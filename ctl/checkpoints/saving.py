"""Synchronous and background writes of checkpoints, and the begin and finish of a manager."""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ctl.checkpoints.protocol import CheckpointManager
from ctl.errors import SaveError
from ctl.io import paths
from ctl.io.paths import AnyPath
from ctl.setting_values import check_choice
from ctl.supervision import heartbeat

ON_ERROR_POLICIES = ("continue", "raise")
_FEW_INODES = 64  # a checkpoint has a handful of files, other programs may need some
T = TypeVar("T")
_log = logging.getLogger("ctl")


@contextlib.contextmanager
def opened_manager(
    manager: CheckpointManager, state: Any, on_saved: Callable[[int, str], None]
) -> Iterator[None]:
    """Calls `begin` of a manager before the block, and `finish` after it.

    If the block has raised an error, an error of `finish` is only logged.
    """

    def finish() -> None:
        with heartbeat.current.enter_phase(heartbeat.SAVING):
            manager.finish()

    with heartbeat.current.enter_phase(heartbeat.SAVING):
        manager.begin(state, on_saved)
    try:
        yield
    except BaseException as error:
        try:
            finish()
        except Exception as e:
            if e is not error:
                _log.error("%s", e)
        raise
    finish()


class Saving:
    """A sequence of writes, of which at most one is in progress, and the error of the newest.

    Args:
      on_error: "continue" logs a SaveError, "raise" raises it. Other errors are always raised.
    """

    def __init__(self, *, on_error: str):
        check_choice("on_error", on_error, ON_ERROR_POLICIES)
        self._should_raise = on_error == "raise"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the newest write

    def run(self, write: Callable[[], T]) -> T | None:
        """Returns the result of `write`, or None after an error that `check` does not raise."""
        result = self._run(write)
        self.check()
        return result

    def start(self, write: Callable[[], object]) -> None:
        """Starts a write in a thread, or writes if no thread can be started. Call `wait` first."""
        self._error = None
        thread = threading.Thread(target=self._run, args=(write,), name="ctl-save")
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # too many threads, or Python 3.12 after the end of the main thread
            self._run(write)

    def wait(self) -> None:
        """Waits until no write is in progress."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def check(self) -> None:
        """Raises the error of the newest write, unless `on_error` permits to continue."""
        if self._error is not None and (self._should_raise or not isinstance(self._error, SaveError)):
            self.raise_error()

    def raise_error(self) -> None:
        """Raises the error of the newest write, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], T]) -> T | None:
        self._error = None
        try:
            return write()
        except BaseException as e:
            self._error = e
            if isinstance(e, SaveError) and not self._should_raise:
                _log.warning("%s Training continues; the last save of the run must succeed.", e)
            return None


def save_error(step: int, path: AnyPath, error: OSError, num_bytes: int, newest: int | None) -> SaveError:
    """Returns the error for a checkpoint that could not be written.

    Args:
      step: Step of the checkpoint.
      path: Its directory.
      error: The cause.
      num_bytes: Size of the checkpoint (bytes).
      newest: Step of the newest committed checkpoint, or None.
    """
    free = paths.free_bytes(path.parent)
    available = "" if free is None else f", {free:,} are free there"
    inodes = paths.free_inodes(path.parent)
    if error.errno == errno.ENOSPC and inodes is not None and inodes < _FEW_INODES:
        available += f", and {inodes:,} more files (inodes) fit there: delete files"
    saved = "There is no checkpoint yet" if newest is None else f"The newest checkpoint is of step {newest}"
    cause = (error.strerror or str(error)).rstrip(".")
    return SaveError(
        f"The checkpoint of step {step} could not be written to {path}: {cause}. It needs "
        f"{num_bytes:,} bytes{available}. {saved}. Free some space, keep fewer (--keep), or give another "
        "--model_dir."
    )
