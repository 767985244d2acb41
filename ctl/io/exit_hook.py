"""Process exit with the exit code of an error and flushed files, without TensorFlow's teardown.

    exit_hook.install_exit_hook()   # scripts: errors of ctl end the process with their exit code
    raise exit_hook.Exit(0)         # ctl.run: ends the process with 0, unless it is caught

TensorFlow's teardown at interpreter exit can be slow, and logs errors. A tf.data iterator waits for its
autotuning thread, which may miss its wake-up: the destructor notifies the thread before it marks it as
cancelled, and the thread then sleeps for a period that doubles up to a minute. Workers that exit at
different times log each other as crashed. The teardown is therefore skipped. Exit functions run, open files
are flushed, and the kernel releases the remaining resources.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from ctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RETRY, CtlError
from ctl.io import error_report
from ctl.tensorflow_patches import live_resources

_WRITERS = ("tensorflow", "h5py", "tensorboard")  # packages with objects that may hold unwritten data
_FLUSH_SECS = 10.0  # timeout for flushing open files
_ANY_FILE = io.IOBase.__base__  # base class of all files that is not an abstract class
_installed = False
_skips_teardown = False
_is_exiting = False  # without the finalization of the interpreter
_STARTS_NO_LATE_THREADS = sys.version_info[:2] == (3, 12)
_last_flush: "_OneCall | None" = None
_finders: list[Callable[[], Iterable[Any]]] = []  # return the objects that must not be destroyed
_pauses: list[Callable[[], object]] = []
_translations: list[Callable[[Exception], Exception]] = []


class Exit(SystemExit):
    """A SystemExit that skips TensorFlow's teardown if it is not caught.

    The exit functions of `atexit` run, open files and summary writers are flushed, and the process ends.
    Tests and notebooks catch it; it then has no further effect.
    """

    def __init__(self, code: int):
        super().__init__(code)

    def __del__(self) -> None:
        # The interpreter deletes an uncaught error while no Python frame runs.
        if sys is not None and not _has_caller() and isinstance(self.code, int):
            _prepare_flush()
            atexit.register(_exit_process, self.code)  # the last registered function runs first


def install_exit_hook() -> None:
    """Calls `install_exit_codes` and skips TensorFlow's teardown at the end of the process. Idempotent.

    A script that ends without an uncaught error keeps its exit code.
    """
    global _skips_teardown  # noqa: PLW0603
    install_exit_codes()
    _prepare_flush()
    if not _skips_teardown:
        _skips_teardown = True
        atexit.register(_skip_teardown)


def install_exit_codes() -> None:
    """Installs an excepthook that ends this process with the exit code of an uncaught error. Idempotent.

    An error that passed through ctl is printed as a short report (io/error_report.py). Under pytest, in a
    notebook and under `python -i` the process continues.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _print_uncaught(previous, error_type, error, trace)
        cause = _find_exit_cause(error)
        code = cause.exit_code if isinstance(cause, CtlError) else EXIT_FAILED
        if isinstance(error, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        if sys.flags.interactive or sys.flags.inspect or _has_caller():
            return  # the process continues
        if code == EXIT_RETRY and not (isinstance(cause, CtlError) and cause.runs_exit_functions):
            end_process(code)
        _prepare_flush()
        atexit.register(_exit_process, code)  # runs after threads have ended

    sys.excepthook = hook


def skips_exit_functions() -> bool:
    """Returns True if this process ends without the exit functions of the C library."""
    return _skips_teardown or _is_exiting


def translate_errors(translate: Callable[[Exception], Exception]) -> None:
    """Registers a function that restores the type of errors of ctl in another library's errors. Idempotent.

    Args:
      translate: Error -> the original error, or the same error if it is not an error of ctl.
    """
    if translate not in _translations:
        _translations.append(translate)


def _find_exit_cause(error: BaseException) -> BaseException:
    """Returns the error that determines the exit code: `error`, or the loss of a peer that caused it.

    An error during the handling of a LostRankError, such as that of a closed session, is a consequence of
    the lost peer.
    """
    link: BaseException | None = error
    links: list[BaseException] = []
    while link is not None and link not in links:
        links.append(link)
        for translate in _translations:
            translated = translate(link) if isinstance(link, Exception) else link
            is_first = link is error
            if isinstance(translated, CtlError) and (is_first or translated.exit_code == EXIT_RETRY):
                return translated
        if isinstance(link, CtlError) and (link is error or link.exit_code == EXIT_RETRY):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error


def _print_uncaught(
    previous: Callable, error_type: type, error: BaseException, trace: TracebackType | None
) -> None:
    """Prints the short report of an error that passed through ctl, or calls the previous hook."""
    text = ""
    with contextlib.suppress(Exception):  # an error in the report must not hide the original error
        if isinstance(error, Exception) and error_report.can_shorten(error):
            text = error_report.short_report(error, trace)
    if text:
        print(text, file=sys.stderr, flush=True)
    else:
        previous(error_type, error, trace)


def end_process(code: int) -> None:
    """Ends the process. EXIT_RETRY skips exit functions, because they may wait for a lost peer."""
    if code == EXIT_RETRY:
        _flush_standard()
        os._exit(code)
    _exit_process(code)


def keep_alive(find: Callable[[], Iterable[Any]], pause: Callable[[], object]) -> None:
    """Prevents the destruction of objects at the end of the process.

    Args:
      find: Returns the objects. Called when the process ends.
      pause: Called before the finalization of the interpreter. Blocks until no thread destroys such an
        object. A thread that returns from native code during the finalization would abort the process.
    """
    _finders.append(find)
    _pauses.append(pause)


def _has_caller() -> bool:
    """Returns True if the calling method was called by Python code."""
    try:
        sys._getframe(2)
    except ValueError:
        return False
    return True


def _exit_process(code: int) -> None:
    global _is_exiting  # noqa: PLW0603
    _is_exiting = True
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal sends it twice
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(code))  # the process is ending
    atexit.unregister(_exit_process)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        _call_with_timeout(_FLUSH_SECS, _flush_all)
    _flush_standard()
    os._exit(code)


class _OneCall:
    """A thread that waits for a function and calls it."""

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ctl-flush", daemon=True)
        self._thread.start()

    def is_waiting(self) -> bool:
        """Returns False after the call, and in a process that was forked since the construction."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], None], timeout_secs: float) -> None:
        """Calls a function in the thread and waits at most `timeout_secs` for it."""
        self._functions.put(function)
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        self._functions.get()()


def _prepare_flush() -> None:
    """Starts the thread of the last flush in Python 3.12, which starts none during the finalization."""
    global _last_flush  # noqa: PLW0603
    if _STARTS_NO_LATE_THREADS and _waiting_thread() is None:
        _last_flush = _OneCall()


def _waiting_thread() -> _OneCall | None:
    return _last_flush if _last_flush is not None and _last_flush.is_waiting() else None


def _call_with_timeout(timeout_secs: float, function: Callable[[], None]) -> None:
    """Calls a function in a thread and waits at most `timeout_secs` for it.

    A flush may block, because a thread that writes to a full pipe locks its file.
    """
    try:
        thread = _waiting_thread() or _OneCall()
    except RuntimeError:  # at the end of a program that has forked, in Python 3.12
        function()
        return
    thread.call(function, timeout_secs)


def _flush_all() -> None:
    """Flushes or closes open files and writers, as the finalization of the interpreter would."""
    standard_streams = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
    class_groups = [classes() for classes in _CLASSES_TO_CLOSE]
    objects_to_close: list[list[Any]] = [[] for _ in class_groups]
    handler_by_class: dict[int, Callable[[Any], object] | None] = {}
    gc.unfreeze()  # get_objects does not return frozen objects
    for value in gc.get_objects():  # hundreds of thousands
        value_class = type(value)  # __class__ of a proxy may raise an error
        if id(value_class) not in handler_by_class:
            handler_by_class[id(value_class)] = None
            with contextlib.suppress(Exception):
                handler_by_class[id(value_class)] = _create_handler(
                    value_class, class_groups, objects_to_close
                )
        handle = handler_by_class[id(value_class)]
        if handle is not None:
            with contextlib.suppress(Exception):
                handle(value)
    for value in (value for group in objects_to_close for value in group):
        if not any(value is stream for stream in standard_streams):
            with contextlib.suppress(Exception):
                if _is_writable(value):
                    value.close()


def _create_handler(
    value_class: type, class_groups: list[tuple[type, ...]], objects_to_close: list[list[Any]]
) -> Callable[[Any], object] | None:
    """Returns a function that flushes an object of a class or adds it to `objects_to_close`, or None."""
    bases = value_class.__mro__  # issubclass calls hooks of abstract classes, and takes ten times as long
    for classes, group in zip(class_groups, objects_to_close, strict=True):
        if any(base in classes for base in bases):
            return group.append
    package = (value_class.__module__ or "").partition(".")[0]
    if _ANY_FILE in bases or (package in _WRITERS and hasattr(value_class, "flush")):
        return lambda value: _is_writable(value) and value.flush()
    return None


def _is_writable(value: Any) -> bool:
    """Returns False for read-only files. A flush would wait for a thread that reads from the file."""
    writable = getattr(value, "writable", None)
    return writable is None or bool(writable())


def _find_loaded_class(module: str, name: str) -> tuple[type, ...]:
    loaded = getattr(sys.modules.get(module), name, None)
    return (loaded,) if isinstance(loaded, type) else ()


# Classes that write their last part in `close`. An object of a group may wrap an object of a later group.
_CLASSES_TO_CLOSE: tuple[Callable[[], tuple[type, ...]], ...] = (
    lambda: (io.TextIOWrapper,),
    lambda: (*_find_loaded_class("tarfile", "TarFile"), *_find_loaded_class("zipfile", "ZipFile")),
    lambda: (
        *_find_loaded_class("gzip", "GzipFile"),
        *_find_loaded_class("bz2", "BZ2File"),
        *_find_loaded_class("lzma", "LZMAFile"),
    ),
)


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _skip_teardown() -> None:
    """Keeps TensorFlow's objects alive, and skips the exit functions of the C library."""
    has_context = live_resources.is_context_imported()
    values = [live_resources.loaded_context()] if has_context else []
    for pause in () if _is_exiting else _pauses:
        pause()
    for find in (*_finders, live_resources.resource_handles):
        with contextlib.suppress(Exception):
            values += find()
    with contextlib.suppress(Exception):
        for value in values:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        if has_context:
            library = ctypes.CDLL(None)
            library.on_exit(library._exit, None)  # glibc passes the exit status to _exit
