"""One save at a time, in the caller's thread or in one of its own; a manager's begin and finish."""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ctl.checkpoints.protocol import CheckpointManager
from ctl.errors import SaveError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath
from ctl.supervision import heartbeat

ON_ERROR_POLICIES = ("continue", "raise")
_FEW_INODES = 64  # a checkpoint has a handful of files, other programs may need some
_log = logging.getLogger("ctl")


@contextlib.contextmanager
def around(manager: CheckpointManager, state: Any, on_saved: Callable[[int, str], None]) -> Iterator[None]:
    """Calls `begin` of a manager before the block, and `finish` after it.

    An error of `finish` is logged if the block has raised one too, so that the block's error is seen.
    """

    def finish() -> None:
        with heartbeat.here.doing(heartbeat.SAVING):
            manager.finish()

    with heartbeat.here.doing(heartbeat.SAVING):
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
    """Runs writes one after the other, and remembers how the newest ended."""

    def __init__(self, *, on_error: str):
        if on_error not in ON_ERROR_POLICIES:
            raise UsageError(f"on_error is {on_error!r}; expected 'continue' or 'raise'.")
        self._raises = on_error == "raise"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the newest write

    def run(self, write: Callable[[], object]) -> None:
        """Writes here and now; raises as `check` does."""
        self._try(write)
        self.check()

    def start(self, write: Callable[[], object]) -> None:
        """Begins a write in a thread of its own. Call `wait` first."""
        self._error = None
        self._thread = threading.Thread(target=self._try, args=(write,), name="ctl-save")
        self._thread.start()

    def wait(self) -> None:
        """Returns when no write is under way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def check(self) -> None:
        """Raises what the newest write raised, unless training goes on without that checkpoint."""
        if self._error is not None and (self._raises or not isinstance(self._error, SaveError)):
            self.raise_error()

    def raise_error(self) -> None:
        """Raises what the newest write raised, in any case."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, write: Callable[[], object]) -> None:
        self._error = None
        try:
            write()
        except BaseException as e:
            self._error = e
            if isinstance(e, SaveError) and not self._raises:
                _log.warning("%s Training goes on until its last save, which must succeed.", e)


def failed(step: int, path: AnyPath, error: OSError, num_bytes: int, newest: int | None) -> SaveError:
    """The error for a checkpoint that could not be written to `path`."""
    free = paths.bytes_free(path.parent)
    left = "" if free is None else f", {free:,} are free there"
    inodes = paths.inodes_free(path.parent)
    if error.errno == errno.ENOSPC and inodes is not None and inodes < _FEW_INODES:
        left += f", and {inodes:,} more files (inodes) fit there: delete files"
    kept = "Nothing is saved so far" if newest is None else f"The newest checkpoint is of step {newest}"
    cause = (error.strerror or str(error)).rstrip(".")
    return SaveError(
        f"The checkpoint of step {step} could not be written to {path}: {cause}. It needs "
        f"{num_bytes:,} bytes{left}. {kept}. Free some space, keep fewer (--keep), or give another "
        "--model_dir."
    )
