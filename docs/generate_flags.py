"""Writes docs/flags.md from the flags that every `ctl` binary has.

    python docs/generate_flags.py

tests/test_config_docs.py compares the file with what this makes.
"""

from pathlib import Path

from absl import flags
from ctl.app import describe_default, description
from ctl.config import GROUPS, define_flags

PAGE = Path(__file__).with_name("flags.md")
_INTRO = """\
# Flags

<!-- Written by `python docs/generate_flags.py`; a test compares. Do not edit by hand. -->

Every binary that ends with `ctl.run(...)` has these flags, as `--name=value`, besides those of the model's
own file ([decision 9](decisions/0009-model-settings-are-constructor-arguments.md)). `--help` prints them.

```sh
python -m models.mnist --help
```

Precedence: a flag, then a keyword of `ctl.run`, then an attribute or constructor default of the class, then
the default below. `--nojit_compile` turns off what a class turns on. Names do not change.
"""


def page() -> str:
    """The whole of docs/flags.md."""
    values = flags.FlagValues()
    define_flags(values)
    parts = [_INTRO]
    for title, group in GROUPS.items():
        rows = "".join(_row(values[name]) for name in group)
        parts.append(f"\n## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}")
    return "".join(parts)


def _row(flag: flags.Flag) -> str:
    default = describe_default(flag)
    shown = f"`{default}`" if default else "empty"
    return f"| `--{flag.name}` | {shown} | {description(flag).replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
