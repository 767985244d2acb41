"""Handlers of signals that arrive while a program is still importing modules.

`import ctl` installs two handlers in programs, and none in notebooks and interactive sessions:

- A Ctrl-C during an import ends the program with one line instead of a traceback.
- SIGTERM and SIGHUP end the first process of a container, for which the kernel ignores the default action.
"""

import contextlib
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from ctl.errors import EXIT_PREEMPTED
from ctl.io import log_filter

_installed = False


def install_early_handlers() -> None:
    """Installs the handlers. A no-op if they are installed, and in notebooks and interactive sessions."""
    global _installed  # noqa: PLW0603
    main = sys.modules.get("__main__")
    is_program = getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")
    is_interactive = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")
    if _installed or not is_program or is_interactive or "pytest" in sys.modules:
        return
    _installed = True
    _replace_excepthook()
    if os.getpid() == 1 and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _exit)


def _replace_excepthook() -> None:
    previous = sys.excepthook

    def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(error_type, KeyboardInterrupt) and _is_import(trace):
            print("Stopped by Ctrl-C during an import; no step was under way.", file=sys.stderr, flush=True)
            return
        previous(error_type, error, trace)

    sys.excepthook = hook


def _is_import(trace: TracebackType | None) -> bool:
    """Returns True if the body of a second module is running. The program is the first module."""
    num_modules = 0
    while trace is not None:
        num_modules += trace.tb_frame.f_code.co_name == "<module>"
        trace = trace.tb_next
    return num_modules > 1


def _exit(number: int, frame: Any) -> None:
    message = f"Stopped by {signal.Signals(number).name}; no step was under way.\n"
    with contextlib.suppress(OSError):
        os.write(log_filter.stderr_descriptor(), message.encode())
    os._exit(EXIT_PREEMPTED)
