"""The modules of models/, imported into one process, whose flags may have the same names."""

import importlib
from types import ModuleType

from absl import flags


def imported(name: str) -> ModuleType:
    """A model's module, whose flags are put away: another model may have some of the same names."""

    def put_away():
        where = flags.FLAGS.find_module_defining_flag
        names = [n for n in flags.FLAGS if str(where(n)).startswith("models.")]
        kept = {n: flags.FLAGS[n] for n in names}
        for n in names:
            delattr(flags.FLAGS, n)
        return kept

    before = put_away()
    module = importlib.import_module(f"models.{name}")
    put_away()
    for flag in before.values():
        flags.DEFINE_flag(flag, module_name="models.mnist")
    return module
