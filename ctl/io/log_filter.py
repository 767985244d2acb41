"""TensorFlow's start-up lines about CPU instructions and absent GPUs, hidden; everything else is kept.

TF_CPP_MIN_LOG_LEVEL does not reach lines that are written before TensorFlow's logging is ready, so
standard error is held back while TensorFlow is imported and its devices are first listed, and what
is not known noise is written out afterwards. Set TF_CPP_MIN_LOG_LEVEL=0 to see it all.
"""

import contextlib
import importlib.abc
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
)


def wanted() -> bool:
    """False if a user asked for all of TensorFlow's log."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"


@contextlib.contextmanager
def quiet() -> Any:
    """Holds standard error back, also that of native code, and then writes all but the noise."""
    try:
        saved = os.dup(2)
    except OSError:  # no standard error at all
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held:
                if not _NOISE.match(line):
                    os.write(2, line)


class _QuietImport(importlib.abc.MetaPathFinder):
    """Imports TensorFlow within `quiet`, once, whoever asks for it."""

    def find_spec(self, fullname: Any, path: Any = None, target: Any = None) -> Any:
        if fullname != "tensorflow":
            return None
        remove_log_filter()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with quiet():
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _QuietImport()


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
