"""Flags of the settings in `ctl.Config`."""

from collections.abc import Sequence
from typing import Any

from absl import flags
from ctl.config import FIELDS


class _CompileParser(flags.EnumParser):
    def parse(self, argument: str) -> str:
        return super().parse({"true": "step", "false": "off"}.get(argument, argument))


class _CompileFlag(flags.EnumFlag):
    """Flag with a word as its value. `--jit_compile` means the second word, `--nojit_compile` the first."""

    def __init__(self, name: str, default: str, text: str, choices: Sequence[str]):
        super().__init__(name, default, text, list(choices))
        self.parser, self.boolean = _CompileParser(list(choices)), True

    def serialize(self) -> str:
        return f"--{self.name}={self.value}"


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of every `ctl` binary; see docs/flags.md."""
    options: dict[str, Any] = {"flag_values": values, "module_name": "ctl.app"}
    for name, field in FIELDS.items():
        value_type, text = field.metadata["type"], field.metadata["help"]
        default: Any = field.default
        if value_type == "choice":
            flags.DEFINE_enum(name, default, field.metadata["choices"], text, **options)
        elif value_type in ("text", "steps", "range"):
            flags.DEFINE_string(name, default, text, **options)
        elif value_type == "bool":
            flags.DEFINE_bool(name, default, text, **options)
        elif value_type == "compile":
            flags.DEFINE_flag(_CompileFlag(name, default, text, field.metadata["choices"]), **options)
        elif value_type == "list":
            flags.DEFINE_list(name, list(default), text, **options)
        elif value_type == "real":
            flags.DEFINE_float(name, default, text, lower_bound=0.0, **options)
        else:
            least = 1 if value_type == "positive" else 0
            flags.DEFINE_integer(name, default, text, lower_bound=least, **options)
