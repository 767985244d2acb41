"""Writes ctl/setting_types.py, the types of the settings, from the fields of `ctl.Config`.

    python docs/generate_setting_types.py

tests/test_typing.py compares the file with the result of this script.
"""

import dataclasses
import typing
from pathlib import Path

from ctl.config import FIELDS, RUN_SETTINGS

FILE = Path(__file__).resolve().parent.parent / "ctl/setting_types.py"
_TYPE_BY_KIND = {
    "text": "str | PathLike[str] | None", "range": "str | None", "names": "Sequence[Any] | None",
}  # fmt: skip; others: that of the field
_INTRO = '''\
"""Types of the settings of `ctl.Config` as keywords, for type checkers.

Written by generate_setting_types.py; a test compares. Do not edit by hand.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import tensorflow as tf
    from absl.flags import FlagHolder


class TrainerSettings(TypedDict, total=False):
    """Settings of a trainer, as in docs/flags.md."""

'''
_RUN_SETTINGS = '''

class RunSettings(TrainerSettings, total=False):
    """Settings of a trainer and of `ctl.run`, as in docs/flags.md."""

'''
_RUN = '''

class RunFunction(Protocol):
    """Type of `ctl.run`. Keywords that are no settings are arguments of the trainer, of any type."""

    def __call__(
        self,
        trainer: Callable[..., Any],
        *,
'''
_END = '''\
        **arguments: Any,
    ) -> None:
        """Parses the command line, and runs the program in --mode."""
'''


def module() -> str:
    """The whole of ctl/setting_types.py."""
    type_by_name = {name: keyword_type(field) for name, field in FIELDS.items()}
    # `writers` of ctl.Trainer is a separate keyword, which also accepts objects
    names = {*RUN_SETTINGS, *(n for n, field in FIELDS.items() if field.metadata["type"] == "names")}
    of_run = {n: t for n, t in type_by_name.items() if n in names}
    of_trainer = {n: t for n, t in type_by_name.items() if n not in names}
    parts = [_INTRO, _lines(of_trainer), _RUN_SETTINGS, _lines(of_run), _RUN]
    for name, keyword in type_by_name.items():
        text = f"FlagHolder[Any] | {keyword.strip(chr(34))}"
        parts.append(f'        {name}: "{text}" = ...,\n')
    return "".join([*parts, _END])


def keyword_type(field: "dataclasses.Field") -> str:
    """The type of a keyword for a setting."""
    is_class = isinstance(field.type, type) and typing.get_origin(field.type) is None
    of_field = field.type.__name__ if is_class else str(field.type)
    text = _TYPE_BY_KIND.get(field.metadata["type"], of_field.removeprefix("collections.abc."))
    return f'"{text}"' if "tf." in text else text


def _lines(type_by_name: dict[str, str]) -> str:
    return "".join(f"    {name}: {keyword}\n" for name, keyword in type_by_name.items())


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
