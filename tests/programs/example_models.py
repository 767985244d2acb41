"""Imports of modules of models/ into one process. Their flags may have the same names."""

import importlib
from types import ModuleType

from absl import flags


def import_model(name: str) -> ModuleType:
    """Imports a model and unregisters its flags, because other models may define the same names."""

    def unregister_flags():
        find_module = flags.FLAGS.find_module_defining_flag
        names = [n for n in flags.FLAGS if str(find_module(n)).startswith("models.")]
        flag_by_name = {n: flags.FLAGS[n] for n in names}
        for n in names:
            delattr(flags.FLAGS, n)
        return flag_by_name

    previous_flags = unregister_flags()
    module = importlib.import_module(f"models.{name}")
    unregister_flags()
    for flag in previous_flags.values():
        flags.DEFINE_flag(flag, module_name="models.mnist")
    return module
