"""A script without `ctl.run` ends with the exit code that its error means, too."""

import atexit
import contextlib
import os
import sys
from types import TracebackType

from ctl.errors import EXIT_RETRY, CtlError

_installed = False


def install() -> None:
    """From now on an uncaught error of `ctl` ends this process with the error's exit code.

    The traceback is printed as before. Under pytest and in a notebook nothing changes.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if not isinstance(error, CtlError):
            return
        if error.exit_code != EXIT_RETRY:  # else TensorFlow's teardown waits for the peer that is gone
            with contextlib.suppress(Exception):
                atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(error.exit_code)

    sys.excepthook = hook
