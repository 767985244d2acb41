"""Filter for TensorFlow's start-up messages about CPU instructions and missing GPUs.

TF_CPP_MIN_LOG_LEVEL does not affect messages that TensorFlow writes before it has initialized its logging.
Standard error is therefore buffered during the import of TensorFlow and its first listing of devices, and
afterwards written without the lines that match the filter. TF_CPP_MIN_LOG_LEVEL=0 disables the filter.

The same hook pauses the garbage collection during the imports of TensorFlow and Keras, which saves a sixth
of their time. They create half a million objects that are never freed, and the collector would traverse
them repeatedly.
"""

import contextlib
import gc
import glob
import importlib.util
import logging
import os
import re
import sys
import tempfile
from typing import Any

_FEW = 1000  # objects: Python 3.12 starts with 375 frozen ones; gc.freeze() in a program freezes more
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog"
    rb"|I\d{4} \d|To enable the following instructions:"
    rb"|E\d{4} .*failed call to cuInit: .*UNKNOWN ERROR \(303\)"
    rb"|.*\bE .*Unable to register cu(?:DNN|FFT|BLAS) factory: "  # TensorFlow 2.16, on every machine
    rb"|E\d{4} .*Unable to register cu(?:DNN|FFT|BLAS) factory: "  # 2.17 and 2.18
)


def _is_enabled() -> bool:
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"


_stderr = 2  # the descriptor of standard error, also while `quiet` redirects it


def stderr_descriptor() -> int:
    """Returns the descriptor of standard error for signal handlers, because `quiet` redirects number 2."""
    return _stderr


@contextlib.contextmanager
def quiet() -> Any:
    """Buffers standard error, also of native code, and writes the filtered lines after the block."""
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    global _stderr  # noqa: PLW0603
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        previous, _stderr = _stderr, saved
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            _stderr = previous
            os.close(saved)
            buffer.seek(0)
            for line in buffer:
                if not _NOISE.match(line):
                    os.write(2, line)


@contextlib.contextmanager
def garbage_collection_paused() -> Any:
    """Pauses the garbage collection within the block. New objects are then in the oldest generation."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FEW:
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation
        gc.enable()


class _ImportHook:
    """Imports Keras and TensorFlow without garbage collection, and TensorFlow within `quiet`."""

    def __init__(self) -> None:
        self._pending_modules = {"keras", "tensorflow"}
        self._is_searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self._is_searching or fullname not in self._pending_modules:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            self._pending_modules.discard(fullname)
            if not self._pending_modules:
                remove_log_filter()
            filtered = quiet() if fullname == "tensorflow" else contextlib.nullcontext()
            with garbage_collection_paused(), filtered:
                execute(module)
            if fullname == "tensorflow" and not glob.glob("/dev/nvidia[0-9]*"):
                from ctl.tensorflow_patches.quiet_device_search import quiet_device_search

                quiet_device_search(quiet)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _ImportHook()


def quiet_logs() -> None:
    """Sets the log level of absl and TensorFlow to WARNING, which omits messages about internals."""
    if _is_enabled():
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("tensorflow").setLevel(logging.WARNING)


def install_log_filter() -> None:
    """Installs the import hook. A no-op if TensorFlow has already been imported."""
    if "tensorflow" not in sys.modules and _finder not in sys.meta_path and _is_enabled():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings and below
        sys.meta_path.insert(0, _finder)


def remove_log_filter() -> None:
    """Removes the import hook."""
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_finder)
