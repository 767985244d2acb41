"""Replacement of Horovod for unmodified programs, installed by `import ctl.hvd.as_horovod`.

Afterwards `import horovod.tensorflow` loads `ctl.hvd`, and so does `import perseus.tensorflow.horovod`, a
vendor's name of the same API. Keras 3 then also accepts three spellings of Keras 2
(`ctl.tensorflow_patches.keras2_spellings`). `ctlrun --as-horovod` and `perseusrun` import this
module through the packages in `ctl/hvd/shims`.

Raises UsageError if the real Horovod is installed, unless `ctlrun --as-horovod` started the program.
"""

import importlib
import importlib.util
import os
import sys
import types

from ctl.errors import UsageError
from ctl.launch.rank_environment import SHIM_FOLDER
from ctl.tensorflow_patches import keras2_spellings

_VERSION = "0.28.1"  # the version with this API
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
    "runner": "ctl.launch.run_function",
}


_VENDORS = {"perseus.tensorflow.horovod": "tensorflow", "perseus.keras": "keras"}


def _install() -> None:
    if getattr(sys.modules.get("horovod"), "__ctl__", False):
        return
    if _is_installed("horovod"):
        raise UsageError(
            "ctl.hvd.as_horovod replaces the module 'horovod', but a package of this name is installed; "
            "uninstall it, or import ctl.hvd instead."
        )
    root = types.ModuleType("horovod", "Replacement of Horovod; see ctl.hvd.")
    root.__path__ = []
    root.__dict__.update(__ctl__=True, __version__=_VERSION)
    sys.modules["horovod"] = root
    for name, module in _MODULES.items():
        loaded_module = sys.modules[f"horovod.{name}"] = importlib.import_module(module)
        if "." not in name:
            setattr(root, name, loaded_module)
    root.__dict__["run"] = importlib.import_module("ctl.launch.run_function").run
    for name, horovod_name in _VENDORS.items():
        _install_vendor(name, horovod_name)
    keras2_spellings.install_keras2_spellings()


def _install_vendor(name: str, horovod_name: str) -> None:
    """Installs modules under a vendor's names, unless the vendor's own package is installed."""
    top_package = name.partition(".")[0]
    if not getattr(sys.modules.get(top_package), "__ctl__", False) and _is_installed(top_package):
        return
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent not in sys.modules:
            package = types.ModuleType(parent, "Replacement of a vendor's Horovod; see ctl.hvd.")
            package.__path__ = []
            package.__dict__["__ctl__"] = True
            sys.modules[parent] = package
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], package)
    for module_name in _MODULES:
        if module_name == horovod_name or module_name.startswith(f"{horovod_name}."):
            sys.modules[name + module_name.removeprefix(horovod_name)] = sys.modules[
                f"horovod.{module_name}"
            ]
    setattr(sys.modules[name.rpartition(".")[0]], parts[-1], sys.modules[name])


def _is_installed(name: str) -> bool:
    """Returns True if a package can be imported that is not one of `ctl/hvd/shims`."""
    spec = importlib.util.find_spec(name)
    return spec is not None and not str(spec.origin).startswith(f"{SHIM_FOLDER}{os.sep}")


_install()
