"""The end of the process: the right exit code, everything flushed, no teardown of TensorFlow.

    exit_hook.install_exit_hook()            # scripts: errors of ctl end the process with their exit code
    raise exit_hook.Exit(0)        # ctl.run: end the process with 0, unless it is caught

TensorFlow's own teardown at interpreter exit is neither quick nor silent. A tf.data iterator waits for
its autotuning thread, whose wake-up can be lost: the destructor notifies the thread before it marks
it as cancelled, and the thread then sleeps for a period that doubles up to a minute. Workers that
leave one after the other log each other as crashed. So nothing of it is run: Python's exit
functions and open files are taken care of, and the kernel releases the rest.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from ctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RETRY, CtlError
from ctl.io import error_report

_WRITERS = ("tensorflow", "h5py", "tensorboard")  # packages whose objects may hold unwritten data
_FLUSH_SECS = 10.0  # for what is open at the end
_ANY_FILE = io.IOBase.__base__  # of all files, and no abstract class
_installed = False
_skips_teardown = False
_leaving = False  # without the interpreter's own end
_kept: list[Callable[[], Iterable[Any]]] = []  # what must not be destroyed at the end
_pauses: list[Callable[[], object]] = []
_translations: list[Callable[[Exception], Exception]] = []


class Exit(SystemExit):
    """SystemExit that, uncaught, ends the process with its code as soon as the interpreter gives up.

    The exit functions of `atexit` run, open files and summary writers are flushed, and then the kernel
    is asked to end the process. Where somebody catches it (a test, a notebook) it is a SystemExit.
    """

    def __init__(self, code: int):
        super().__init__(code)

    def __del__(self) -> None:
        # Uncaught, it is dropped by the interpreter, which runs no Python frame any more.
        if sys is not None and not _has_caller() and isinstance(self.code, int):
            atexit.register(_leave, self.code)  # the last to be registered is the first to run


def install_exit_hook() -> None:
    """Installs the exit codes of `install_exit_codes` and skips TensorFlow's teardown; idempotent.

    A script that ends in any other way keeps its exit code.
    """
    global _skips_teardown  # noqa: PLW0603
    install_exit_codes()
    if not _skips_teardown:
        _skips_teardown = True
        atexit.register(_skip_teardown)


def install_exit_codes() -> None:
    """Ends this process with the exit code of an uncaught error; idempotent.

    An error that came through ctl is printed as a short report (io/error_report.py). Under pytest, in a
    notebook and under `python -i` the process continues.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _print_uncaught(before, kind, error, trace)
        cause = _cause_of_end(error)
        code = cause.exit_code if isinstance(cause, CtlError) else EXIT_FAILED
        if isinstance(error, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        if sys.flags.interactive or sys.flags.inspect or _has_caller():
            return  # the process continues
        if code == EXIT_RETRY and not (isinstance(cause, CtlError) and cause.runs_exit_functions):
            end(code)
        atexit.register(_leave, code)  # once threads have ended, as Python does

    sys.excepthook = hook


def translate_errors(translate: Callable[[Exception], Exception]) -> None:
    """Has `translate` restore the type of errors of ctl that another library has wrapped; idempotent."""
    if translate not in _translations:
        _translations.append(translate)


def _cause_of_end(error: BaseException) -> BaseException:
    """Returns the error whose exit code counts: `error`, or the loss of a peer that led to it.

    An error while a LostRankError is handled or cleaned up after, such as that of a session that is closed,
    is no failure of the program itself.
    """
    link: BaseException | None = error
    links: list[BaseException] = []
    while link is not None and link not in links:
        links.append(link)
        for translate in _translations:
            own = translate(link) if isinstance(link, Exception) else link
            if isinstance(own, CtlError) and (link is error or own.exit_code == EXIT_RETRY):
                return own
        if isinstance(link, CtlError) and (link is error or link.exit_code == EXIT_RETRY):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error


def _print_uncaught(
    before: Callable, kind: type, error: BaseException, trace: TracebackType | None
) -> None:
    """Prints the short report of an error that came through ctl, and of others what was printed before."""
    text = ""
    with contextlib.suppress(Exception):  # a report that fails must not hide the error
        if isinstance(error, Exception) and error_report.can_shorten(error):
            text = error_report.short_report(error, trace)
    if text:
        print(text, file=sys.stderr, flush=True)
    else:
        before(kind, error, trace)


def end(code: int) -> None:
    """Ends the process now; EXIT_RETRY does so without exit functions, which may wait for a lost peer."""
    if code == EXIT_RETRY:
        _flush_standard()
        os._exit(code)
    _leave(code)


def keep(found: Callable[[], Iterable[Any]], pause: Callable[[], object]) -> None:
    """Has the objects that `found()` yields at the end of the process outlive it: never destroyed.

    `pause()` comes before the interpreter's own end, which aborts the process if a thread comes back from
    native code meanwhile: it returns once no thread destroys such an object, and none will.
    """
    _kept.append(found)
    _pauses.append(pause)


def _has_caller() -> bool:
    """Whether the method that calls this was called by Python code."""
    try:
        sys._getframe(2)
    except ValueError:
        return False
    return True


def _leave(code: int) -> None:
    global _leaving  # noqa: PLW0603
    _leaving = True
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal sends it twice
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(code))  # it is about to end, as it says
    atexit.unregister(_leave)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        _within(_FLUSH_SECS, _flush_all)
    _flush_standard()
    os._exit(code)


def _within(limit_secs: float, act: Callable[[], None]) -> None:
    """Calls it; not for longer: a thread that still writes to a full pipe holds the lock of its file."""
    thread = threading.Thread(target=act, name="ctl-flush", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # newer Pythons start no thread at their end
        act()
        return
    thread.join(limit_secs)


def _flush_all() -> None:
    """Writes what open files and writers hold: the interpreter's end would have destroyed them."""
    kept = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
    closed = [kinds() for kinds in _CLOSED]
    found: list[list[Any]] = [[] for _ in _CLOSED]
    known: dict[int, Callable[[Any], object] | None] = {}  # by class
    gc.unfreeze()  # what gc.freeze() hides
    for thing in gc.get_objects():  # hundreds of thousands
        kind = type(thing)  # not its __class__: a proxy may have lost what it stands for
        if id(kind) not in known:
            known[id(kind)] = None
            with contextlib.suppress(Exception):
                known[id(kind)] = _treatment(kind, closed, found)
        treat = known[id(kind)]
        if treat is not None:
            with contextlib.suppress(Exception):
                treat(thing)
    for thing in (thing for things in found for thing in things):
        if not any(thing is stream for stream in kept):
            with contextlib.suppress(Exception):
                if _writes(thing):
                    thing.close()


def _treatment(
    kind: type, closed: list[tuple[type, ...]], found: list[list[Any]]
) -> Callable[[Any], object] | None:
    """What is done with the objects of a class: note them to be closed, flush them, or nothing."""
    bases = kind.__mro__  # issubclass asks abstract classes, which takes ten times as long
    for kinds, things in zip(closed, found, strict=True):
        if any(base in kinds for base in bases):
            return things.append
    package = (kind.__module__ or "").partition(".")[0]
    if _ANY_FILE in bases or (package in _WRITERS and hasattr(kind, "flush")):
        return lambda thing: _writes(thing) and thing.flush()
    return None


def _writes(thing: Any) -> bool:
    """Whether it may hold unwritten data. A file that a thread reads from would wait for that thread."""
    writable = getattr(thing, "writable", None)
    return writable is None or bool(writable())


def _loaded(module: str, name: str) -> tuple[type, ...]:
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()


# What writes its last part when it is closed; each of these may stand on one that follows.
_CLOSED: tuple[Callable[[], tuple[type, ...]], ...] = (
    lambda: (io.TextIOWrapper,),
    lambda: (*_loaded("tarfile", "TarFile"), *_loaded("zipfile", "ZipFile")),
    lambda: (*_loaded("gzip", "GzipFile"), *_loaded("bz2", "BZ2File"), *_loaded("lzma", "LZMAFile")),
)


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _resources() -> list[Any]:
    """All handles of TensorFlow's resources, iterators over anybody's data among them.

    The last handle destroys the resource, wherever it is: in a module, a frame or a distributed iterator.
    """
    kinds = _loaded("tensorflow.python.framework.ops", "EagerTensor")
    resource = getattr(sys.modules.get("tensorflow.python.framework.dtypes"), "resource", None)
    gc.unfreeze()  # what gc.freeze() hides
    return [thing for thing in gc.get_objects() if type(thing) in kinds and thing.dtype == resource]


def _skip_teardown() -> None:
    """What Python's end would destroy stays, and the C library's end is cut short."""
    context = sys.modules.get("tensorflow.python.eager.context")
    things = [] if context is None else [getattr(context, "_context", None)]
    for pause in () if _leaving else _pauses:
        pause()
    for found in (*_kept, _resources):
        with contextlib.suppress(Exception):
            things += found()
    with contextlib.suppress(Exception):
        for thing in things:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        if context is not None:
            library = ctypes.CDLL(None)
            library.on_exit(library._exit, None)  # glibc hands the exit status to _exit
