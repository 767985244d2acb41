"""Ctrl-C, SIGTERM and SIGHUP: the first requests a checkpoint and an orderly end, the second ends at once.

    with signals.starting():                  # ctl.run: before there is anything to save
        with signals.default_action():        # while TensorFlow connects the workers
            strategy = ...
        with signals.Signals() as received:   # the steps
            if received.received: ...

TensorFlow's multi-worker runtime installs a handler of its own for SIGTERM, which swallows it, as soon as
it starts its server. So the handlers from before are installed again once the strategy is made.

SIGHUP (a terminal or ssh session that closes) acts like SIGTERM, with the exit code 143. It often arrives
twice, so it never counts as the second signal. Where it is ignored, as under `nohup`, it stays ignored.

In a task of Slurm SIGUSR1 acts the same: `sbatch --signal=USR1@120` and `scancel --signal=USR1` send it to
all tasks. A program's own handler stays.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ctl.io import exit_hook

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 143}
_COUNT_ONCE = (signal.SIGHUP, signal.SIGUSR1)  # never the second signal, which ends the process
_SHOW_CURSOR = "\x1b[?25h"
_AGAIN_SECS = 0.002
_EXIT_SECS = 10.0  # for exit functions


class Signals:
    """While active, remembers the first signal. Outside the main thread it does nothing.

    Must be entered after the strategy was made, see above.

    >>> with Signals() as signals:
    ...     if signals.received: ...
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict = {}

    def __enter__(self) -> "Signals":
        self._previous = _install(self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        _restore(self._previous)

    def wishes(self) -> list[float]:
        """[0 or 1, 0 or 1]: was SIGTERM received, was Ctrl-C? To be added up over workers."""
        return [
            float(self.received in (signal.SIGTERM, *_COUNT_ONCE)),
            float(self.received == signal.SIGINT),
        ]

    def agree(self, wishes: Sequence[float]) -> bool:
        """Takes over what any worker received, from the sum of `wishes`; SIGTERM comes first."""
        keeps_name = self.received in _COUNT_ONCE and wishes[0]
        if (wishes[0] or wishes[1]) and not keeps_name:
            self.received = int(signal.SIGTERM if wishes[0] else signal.SIGINT)
        return bool(wishes[0] or wishes[1])

    def _handle(self, number: Any, frame: Any) -> None:
        if self.received is None:
            self.received = number
            return
        if number in _COUNT_ONCE:
            return
        _show_cursor()
        os._exit(_EXIT_CODES[signal.Signals(number)])


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Within the block a signal ends the process without delay, with 130 or 143: there is no state to save.

    `Signals` may be used inside, for the part that has something.
    """
    previous = _install(_end)
    try:
        yield
    finally:
        _restore(previous)


@contextlib.contextmanager
def default_action() -> Iterator[None]:
    """Within the block a signal ends the process even if native code waits and installs handlers.

    Python's handlers cannot run while the main thread is in native code, and TensorFlow's must not. The
    kernel ignores the default action for the first process of a container: there a thread ends it.
    """
    is_first = os.getpid() == 1
    previous = _install(_ignore if is_first else signal.SIG_DFL)
    if not previous:
        yield
        return
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    woken = signal.set_wakeup_fd(tells, warn_on_full_buffer=False) if is_first else -1
    done = threading.Event()
    guards = done, told, _native_handlers()
    again = threading.Thread(target=_again, args=guards, name="ctl-signals", daemon=True)
    again.start()
    try:
        yield
    finally:
        done.set()
        again.join()
        if is_first:
            signal.set_wakeup_fd(woken)
        os.close(told)
        os.close(tells)
        _restore(previous)


def exit_code(number: int) -> int:
    """The exit code for an orderly end after signal `number`."""
    return _EXIT_CODES.get(signal.Signals(number), 128 + number)


def name(number: int) -> str:
    """ "Ctrl-C" or "SIGTERM"."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _end(number: int, frame: Any) -> None:
    _show_cursor()
    limit = threading.Timer(_EXIT_SECS, os._exit, [exit_code(number)])  # exit functions may wait
    limit.daemon = True
    limit.start()
    with contextlib.suppress(Exception):
        print(f"Stopped by {name(number)}; no step was under way.", file=sys.stderr)
    exit_hook.end(exit_code(number))


def _ignore(number: int, frame: Any) -> None:
    """Python's handler in native code has told the thread already."""


def _show_cursor() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)


def _install(handler: Callable[[int, Any], None] | signal.Handlers) -> dict:
    """Number -> the handler from before; empty outside the main thread."""
    previous: dict = {}
    for number in _EXIT_CODES:
        if is_ignored(number):
            continue
        try:
            previous[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread
            break
    return previous


def is_ignored(number: int) -> bool:
    """Returns True for a SIGHUP that is ignored, as under `nohup`, and a SIGUSR1 that is not Slurm's."""
    if number == signal.SIGUSR1:
        return not _has_slurm_signal()
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _has_slurm_signal() -> bool:
    """Returns True in a task of Slurm whose program has no handler for SIGUSR1."""
    handler = signal.getsignal(signal.SIGUSR1)
    is_free = handler == signal.SIG_DFL or getattr(handler, "__module__", "") == __name__
    return is_free and "SLURM_PROCID" in os.environ


def _restore(previous: dict) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _native(number: int, handler: int | None) -> int | None:
    """Installs a handler of native code, None for the default one; returns the one before."""
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return install(number, handler)


def _native_handlers() -> dict[int, int | None]:
    """What Python has installed; empty where the C library is not to be had."""
    found: dict[int, int | None] = {}
    with contextlib.suppress(OSError, AttributeError):
        for number in _EXIT_CODES:
            if is_ignored(number):
                continue
            found[number] = _native(number, None)
            _native(number, found[number])
    return found


def _again(done: threading.Event, told: int, handlers: dict[int, int | None]) -> None:
    """Undoes at once what native code does to the signals; ends the process when it is told of one."""
    poll = select.poll()  # unlike select(), for any descriptor
    poll.register(told, select.POLLIN)
    while not done.is_set():
        for number, handler in handlers.items():
            _native(number, handler)
        if poll.poll(1000 * _AGAIN_SECS):
            received = os.read(told, 1)[0]
            os.write(2, f"Stopped by {name(received)}; no step was under way.\n".encode())
            os._exit(exit_code(received))
