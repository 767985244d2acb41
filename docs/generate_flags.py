"""Writes docs/flags.md from the flags that every `ctl` binary has.

    python docs/generate_flags.py

tests/test_config_docs.py compares the page with the result of this script.
"""

import textwrap
from pathlib import Path

from absl import flags
from ctl.config import GROUPS
from ctl.config_flags import define_flags, describe_default, description

PAGE = Path(__file__).with_name("flags.md")
_INTRO = """\
# Flags and settings

<!-- Written by `python docs/generate_flags.py`; a test compares. Do not edit by hand. -->

Each setting is a field of `ctl.Config`, a flag of programs that end with `ctl.run(...)`, and a keyword of
the trainer (not `mode`, `train_steps`, `epochs`, `export`, `report_hypertune`). Your own settings:
[As a command](first_model.md#as-a-command).

```python
import ctl


class Mine(ctl.Trainer):
    seed = 7  # a default of the class

    def __init__(self, config=None, *, dropout=0.0, **options):
        super().__init__(config, **options)
        self.dropout = dropout


config = ctl.Config(model_dir="runs/m", save_every_steps=100)
mine = Mine(config, dropout=0.1)
assert mine.config == Mine(model_dir="runs/m", save_every_steps=100).config
assert (mine.seed, Mine(config, seed=8).seed) == (7, 8)
```

Precedence: flag, keyword of the constructor or of `ctl.run`, value given in the `Config`, attribute of
the class or default of its constructor, default, which the list shows, as does `--help`.
`--nojit_compile` has priority over a class with jit_compile. `config.json` in model_dir has all values
under `"settings"`. Names do not change.
"""


def page() -> str:
    """The whole of docs/flags.md."""
    values = flags.FlagValues()
    define_flags(values)
    parts = [_INTRO]
    for title, group in GROUPS.items():
        parts.append(f"\n## {title}\n\n{''.join(_entry(values[name]) for name in group)}")
    return "".join(parts)


def _entry(flag: flags.Flag) -> str:
    default = describe_default(flag)
    shown = f"`--{flag.name}={default}`" if default else f"`--{flag.name}`"
    text = f"- {shown}: {description(flag)}"
    return textwrap.fill(text, 118, subsequent_indent="  ", break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
