"""Handlers of Ctrl-C, SIGTERM and SIGHUP. The first requests a checkpoint, the second ends the process.

    with signals.immediate_exit():            # ctl.run: while there is no state to save
        with signals.default_action():        # while TensorFlow connects the workers
            strategy = ...
        with signals.Interruption() as interruption:   # the steps
            if interruption.received is not None: ...

When TensorFlow's multi-worker runtime starts its server, it installs a handler for SIGTERM that ignores the
signal. The previous handlers are therefore installed again after the creation of the strategy.

SIGHUP (a terminal or ssh session that closes) has the effect of SIGTERM, with the exit code 143. It often
arrives twice, so it never counts as the second signal. If it is ignored, as under `nohup`, that remains.

In a task of Slurm SIGUSR1 has the same effect: `sbatch --signal=USR1@120` and `scancel --signal=USR1` send
it to all tasks. A handler of the user's program is not replaced.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ctl.io import exit_hook

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 143}
TIME_LIMIT = 0  # in place of the number of a signal
_COUNT_ONCE = (signal.SIGHUP, signal.SIGUSR1)  # never the second signal, which ends the process
_SHOW_CURSOR = "\x1b[?25h"
_REINSTALL_SECS = 0.002
_EXIT_SECS = 10.0  # timeout of the exit functions


class Interruption:
    """A context that records the first signal. Outside of the main thread it records no signals.

    Enter it after the creation of the strategy, because TensorFlow replaces handlers.

    >>> with Interruption() as interruption:
    ...     if interruption.received is not None: ...

    Args:
      max_secs: Time limit (seconds), from now on, that has the effect of a signal. 0: none.
    """

    def __init__(self, max_secs: float = 0.0) -> None:
        self._received: int | None = None
        self._has_handled = False  # a signal to this process
        self._deadline_secs = time.monotonic() + max_secs if max_secs else float("inf")
        self._previous: dict = {}

    @property
    def received(self) -> int | None:
        """Number of the first signal, TIME_LIMIT if the time limit has passed, or None."""
        if self._received is None and time.monotonic() >= self._deadline_secs:
            return TIME_LIMIT
        return self._received

    def __enter__(self) -> "Interruption":
        self._previous = _install(self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        _restore(self._previous)

    @contextlib.contextmanager
    def without_time_limit(self) -> Iterator[None]:
        """Ignores the time limit within the block."""
        deadline_secs, self._deadline_secs = self._deadline_secs, float("inf")
        try:
            yield
        finally:
            self._deadline_secs = deadline_secs

    def votes(self) -> list[float]:
        """Returns [is_sigterm, is_interrupt, is_time_limit] (0 or 1), for a sum over workers."""
        received = self.received
        return [
            float(received in (signal.SIGTERM, *_COUNT_ONCE)),
            float(received == signal.SIGINT),
            float(received == TIME_LIMIT),
        ]

    def apply_votes(self, votes: Sequence[float]) -> bool:
        """Sets `received` on every worker to the signal of any worker.

        SIGTERM has priority over Ctrl-C, and a signal over the time limit.

        Args:
          votes: Sums of `votes` over the workers.

        Returns:
          True if a worker has received a signal, or the time limit has passed.
        """
        num_sigterm, num_interrupt, num_time_limit = votes
        is_kept = self._received in _COUNT_ONCE and num_sigterm
        if (num_sigterm or num_interrupt) and not is_kept:
            self._received = int(signal.SIGTERM if num_sigterm else signal.SIGINT)
        elif num_time_limit and not is_kept:
            self._received = TIME_LIMIT
        return bool(num_sigterm or num_interrupt or num_time_limit)

    def _handle(self, number: Any, frame: Any) -> None:
        if self._received is None:
            self._received = number
        is_repeated, self._has_handled = self._has_handled, True
        if not is_repeated or number in _COUNT_ONCE:
            return
        _show_cursor()
        os._exit(_EXIT_CODES[signal.Signals(number)])


@contextlib.contextmanager
def immediate_exit() -> Iterator[None]:
    """Ends the process on a signal within the block, with exit code 130 or 143, without a checkpoint.

    `Interruption` may be used inside, for the part that has a state to save.
    """
    previous = _install(_end_process)
    try:
        yield
    finally:
        _restore(previous)


@contextlib.contextmanager
def default_action() -> Iterator[None]:
    """Ends the process on a signal within the block, even if native code blocks or installs handlers.

    Python's handlers cannot run while the main thread is in native code, and TensorFlow's handlers must not
    run. The kernel ignores the default action for the first process of a container; a thread ends that one.
    """
    is_first = os.getpid() == 1
    previous = _install(_ignore if is_first else signal.SIG_DFL)
    if not previous:
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_wakeup_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False) if is_first else -1
    stopped = threading.Event()
    arguments = stopped, read_end, _native_handlers()
    guard = threading.Thread(target=_guard_handlers, args=arguments, name="ctl-signals", daemon=True)
    guard.start()
    try:
        yield
    finally:
        stopped.set()
        guard.join()
        if is_first:
            signal.set_wakeup_fd(previous_wakeup_fd)
        os.close(read_end)
        os.close(write_end)
        _restore(previous)


def exit_code(number: int) -> int:
    """Returns the exit code of a process that ends because of signal `number`."""
    return _EXIT_CODES.get(signal.Signals(number), 128 + number)


def signal_name(number: int) -> str:
    """Returns a name for messages, such as "Ctrl-C" or "SIGTERM"."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _end_process(number: int, frame: Any) -> None:
    _show_cursor()
    timeout = threading.Timer(_EXIT_SECS, os._exit, [exit_code(number)])  # exit functions may block
    timeout.daemon = True
    timeout.start()
    with contextlib.suppress(Exception):
        print(f"Stopped by {signal_name(number)}; no step was under way.", file=sys.stderr)
    exit_hook.end_process(exit_code(number))


def _ignore(number: int, frame: Any) -> None:
    """Does not handle the signal. The wakeup descriptor has already notified the thread."""


def _show_cursor() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)


def _install(handler: Callable[[int, Any], None] | signal.Handlers) -> dict:
    """Installs a handler. Returns number -> previous handler, empty outside of the main thread."""
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
    """Returns True in a task of Slurm if the program has no handler for SIGUSR1."""
    handler = signal.getsignal(signal.SIGUSR1)
    is_free = handler == signal.SIG_DFL or getattr(handler, "__module__", "") == __name__
    return is_free and "SLURM_PROCID" in os.environ


def _restore(previous: dict) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _install_native(number: int, handler: int | None) -> int | None:
    """Installs a native handler, None for the default one. Returns the previous one."""
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return install(number, handler)


def _native_handlers() -> dict[int, int | None]:
    """Returns number -> native handler of Python; an empty dictionary if the C library is not available."""
    handlers: dict[int, int | None] = {}
    with contextlib.suppress(OSError, AttributeError):
        for number in _EXIT_CODES:
            if is_ignored(number):
                continue
            handlers[number] = _install_native(number, None)
            _install_native(number, handlers[number])
    return handlers


def _guard_handlers(stopped: threading.Event, read_end: int, handlers: dict[int, int | None]) -> None:
    """Reinstalls handlers that native code replaces, and ends the process on a signal from the pipe."""
    poll = select.poll()  # unlike select(), for any descriptor
    poll.register(read_end, select.POLLIN)
    while not stopped.is_set():
        for number, handler in handlers.items():
            _install_native(number, handler)
        if poll.poll(1000 * _REINSTALL_SECS):
            received = os.read(read_end, 1)[0]
            os.write(2, f"Stopped by {signal_name(received)}; no step was under way.\n".encode())
            os._exit(exit_code(received))
