"""Writes docs/flags.md from the flags that every `ctl` binary has.

    python docs/generate_flags.py

tests/test_flags_doc.py compares the file with what this makes.
"""

from pathlib import Path

from absl import flags
from ctl.config import SETTINGS, define_flags, describe_default, description

PAGE = Path(__file__).with_name("flags.md")
_INTRO = """\
# Flags

<!-- Written by `python docs/generate_flags.py`; a test compares. Do not edit by hand. -->

Every binary that ends with `ctl.run(...)` has these flags, beside those of the model's own file.
Every flag has the form `--name=value`. `--help` shows the same list and ends with exit code 0.

```sh
python -m models.mnist --help
```

A flag that is given wins over the same keyword of `ctl.run`, this over an attribute or a constructor's
default of the class, and this over the default below. `--nojit_compile` turns off what a class turns on.

The list is a promise: a name stays, and a new one needs a decision note. Settings of a model (a
learning rate, a width) are flags of the model's file, see
[decision 9](decisions/0009-model-settings-are-constructor-arguments.md).
"""


def page() -> str:
    """The whole of docs/flags.md."""
    values = flags.FlagValues()
    define_flags(values)
    parts = [_INTRO]
    for title, group in SETTINGS.items():
        rows = "".join(_row(values[setting.name]) for setting in group)
        parts.append(f"\n## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}")
    return "".join(parts)


def _row(flag: flags.Flag) -> str:
    default = describe_default(flag)
    shown = f"`{default}`" if default else "empty"
    return f"| `--{flag.name}` | {shown} | {description(flag).replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
