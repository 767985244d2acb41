"""Flags of the settings in `ctl.Config`, and the text of --help."""

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags
from ctl import setting_names
from ctl.config import FIELDS, GROUPS

_EXPECTED_NUMBERS = {  # by the message of Python about another value
    "could not convert string to float": "a number",
    "invalid literal for int": "a whole number",
}


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
        elif value_type in ("list", "names"):
            flags.DEFINE_list(name, list(default), text, **options)
        elif value_type == "real":
            flags.DEFINE_float(name, default, text, lower_bound=0.0, **options)
        else:
            least = 1 if value_type == "positive" else 0
            flags.DEFINE_integer(name, default, text, lower_bound=least, **options)


def help_text(values: flags.FlagValues, program: str) -> str:
    """Returns the text of --help: all flags in groups, each with its unit, default and choices."""
    settings = set(FIELDS)
    by_module = values.flags_by_module_dict()
    main = by_module.get(sys.argv[0], []) + by_module.get(program, [])
    groups: dict[str, list[str]] = {}
    if model_flags := sorted({f.name for f in main if f.name not in settings}):
        groups["Model"] = model_flags
    groups |= GROUPS
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {program}"
    lines = [f"usage: {command} [--name=value ...]", "", "Every flag has the form --name=value."]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            flag = values[name]
            lines.append(f"  --{name}={describe_default(flag)}")
            lines.append(
                textwrap.fill(description(flag), 96, initial_indent="      ", subsequent_indent="      ")
            )
    lines += ["", "--helpfull lists the flags of every library as well."]
    return "\n".join(lines)


def description(flag: flags.Flag) -> str:
    """Returns the help of a flag, with its choices."""
    choices = flag.parser.enum_values if isinstance(flag, flags.EnumFlag) else ()
    help_line = " ".join((flag.help or "").split())
    prefix = f"<{'|'.join(choices)}>: "
    if choices and help_line.startswith(prefix):
        help_line = help_line[len(prefix) :]
    return f"{help_line} One of {', '.join(choices)}." if choices else help_line


def describe_default(flag: flags.Flag) -> str:
    """Returns the default of a flag in the syntax of the command line."""
    value = flag.default
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def error_message(error: flags.Error, values: flags.FlagValues) -> str:
    """Returns the message of an error of absl with the expected type, or the name of a similar flag."""
    if isinstance(error, flags.UnrecognizedFlagError):
        near = setting_names.similar_names(error.flagname, list(values))
        choices = " or ".join(f"--{name}" for name in near)
        hint = f"Write {choices}." if near else setting_names.instruction_for(error.flagname)
        return f"Unknown command line flag '{error.flagname}'. {hint}".rstrip()
    message = str(error).rstrip(".")
    for python_message, expected in _EXPECTED_NUMBERS.items():
        message = re.sub(f"{python_message}.*", f"expected {expected}", message, flags=re.DOTALL)
    return f"{message}."
