"""TensorFlow's start-up lines about CPU instructions and absent GPUs, hidden; everything else is kept.

TF_CPP_MIN_LOG_LEVEL does not reach lines that are written before TensorFlow's logging is ready, so
standard error is held back while TensorFlow is imported and its devices are first listed, and what
is not known noise is written out afterwards. Set TF_CPP_MIN_LOG_LEVEL=0 to see it all.

The same hook lets TensorFlow and Keras be imported without garbage collection, a sixth of the time:
half a million objects are made, which all stay, and are looked through again and again.
"""

import contextlib
import functools
import gc
import glob
import importlib.util
import logging
import os
import re
import sys
import tempfile
from typing import Any

_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog"
    rb"|I\d{4} \d|To enable the following instructions:"
    rb"|E\d{4} .*failed call to cuInit: .*UNKNOWN ERROR \(303\)"
    rb"|.*\bE .*Unable to register cu(?:DNN|FFT|BLAS) factory: "  # TensorFlow 2.16, on every machine
    rb"|E\d{4} .*Unable to register cu(?:DNN|FFT|BLAS) factory: "  # 2.17 and 2.18
)


def wanted() -> bool:
    """False if a user asked for all of TensorFlow's log."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"


_stderr = 2  # the descriptor of standard error, also while `quiet` redirects it


def stderr_descriptor() -> int:
    """Returns the descriptor of standard error, for signal handlers: `quiet` may redirect number 2."""
    return _stderr


@contextlib.contextmanager
def quiet() -> Any:
    """Holds standard error back, also that of native code, and then writes all but the noise."""
    try:
        saved = os.dup(2)
    except OSError:  # no standard error at all
        yield
        return
    global _stderr  # noqa: PLW0603
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        previous, _stderr = _stderr, saved
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            _stderr = previous
            os.close(saved)
            held.seek(0)
            for line in held:
                if not _NOISE.match(line):
                    os.write(2, line)


@contextlib.contextmanager
def garbage_collection_paused() -> Any:
    """No garbage collection within; what was made counts as old afterwards, as if it had been looked at."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


class _ImportHook:
    """Imports Keras and TensorFlow without garbage collection, and TensorFlow within `quiet`."""

    def __init__(self) -> None:
        self._awaited = {"keras", "tensorflow"}
        self._looks = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self._looks or fullname not in self._awaited:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looks = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            self._awaited.discard(fullname)
            if not self._awaited:
                remove_log_filter()
            held = quiet() if fullname == "tensorflow" else contextlib.nullcontext()
            with garbage_collection_paused(), held:
                execute(module)
            if fullname == "tensorflow" and not glob.glob("/dev/nvidia[0-9]*"):
                _quiet_first_call("ensure_initialized")
                _quiet_first_call("_initialize_physical_devices")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _quiet_first_call(method: str) -> None:
    """Wraps a method of TensorFlow's context: its first call looks for a GPU, and logs that there is none.

    Replaces a private method of `tensorflow.python.eager.context.Context` until that first call. Without
    the method, or with a GPU, nothing is replaced.
    """
    kind = getattr(sys.modules.get("tensorflow.python.eager.context"), "Context", None)
    original = getattr(kind, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def first_call(self: Any, *arguments: Any, **options: Any) -> Any:
        setattr(kind, method, original)
        with quiet():
            return original(self, *arguments, **options)

    setattr(kind, method, first_call)


_finder = _ImportHook()


def quiet_logs() -> None:
    """Sets the loggers of absl and TensorFlow to warnings; INFO is about TensorFlow's inner life."""
    if wanted():
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("tensorflow").setLevel(logging.WARNING)


def install_log_filter() -> None:
    """Makes the coming import of TensorFlow quiet; nothing happens if it came before."""
    if "tensorflow" not in sys.modules and _finder not in sys.meta_path and wanted():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings and below
        sys.meta_path.insert(0, _finder)


def remove_log_filter() -> None:
    """Takes the import hook away again."""
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_finder)
