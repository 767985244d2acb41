"""For code that cannot be changed: after `import ctl.hvd.as_horovod`, `import horovod…` finds `ctl.hvd`.

Importing it is the whole of its use. Raises UsageError where the real Horovod is installed.
"""

import importlib
import importlib.util
import sys
import types

from ctl.errors import UsageError

_VERSION = "0.28.1"  # whose API this is
_MODULES = {
    "tensorflow": "ctl.hvd",
    "tensorflow.compression": "ctl.hvd.compression",
    "tensorflow.elastic": "ctl.hvd.elastic",
    "tensorflow.functions": "ctl.hvd",
    "tensorflow.mpi_ops": "ctl.hvd",
    "tensorflow.sync_batch_norm": "ctl.hvd.sync_batch_norm",
    "tensorflow.util": "ctl.hvd.util",
    "tensorflow.keras": "ctl.hvd.keras",
    "tensorflow.keras.callbacks": "ctl.hvd.keras.callbacks",
    "tensorflow.keras.elastic": "ctl.hvd.keras.elastic",
    "keras": "ctl.hvd.keras",
    "keras.callbacks": "ctl.hvd.keras.callbacks",
    "keras.elastic": "ctl.hvd.keras.elastic",
    "common": "ctl.hvd",
    "common.elastic": "ctl.hvd.elastic",
    "common.exceptions": "ctl.hvd.errors",
    "common.util": "ctl.hvd.util",
    "common.process_sets": "ctl.hvd.process_sets",
    "runner": "ctl.runner.function",
}


def _install() -> None:
    if getattr(sys.modules.get("horovod"), "__ctl__", False):
        return
    if importlib.util.find_spec("horovod") is not None:
        raise UsageError(
            "ctl.hvd.as_horovod stands in for Horovod, but a module of that name can be imported here; "
            "uninstall it, or import ctl.hvd instead."
        )
    root = types.ModuleType("horovod", "Stands in for Horovod; see ctl.hvd.")
    root.__path__ = []
    root.__dict__.update(__ctl__=True, __version__=_VERSION)
    sys.modules["horovod"] = root
    for name, module in _MODULES.items():
        found = sys.modules[f"horovod.{name}"] = importlib.import_module(module)
        if "." not in name:
            setattr(root, name, found)
    root.__dict__["run"] = importlib.import_module("ctl.runner.function").run


_install()
