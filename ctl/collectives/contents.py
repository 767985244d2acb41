"""Descriptions of the tensors of collectives on this rank, for error messages.

Only the names of collectives are sent, and are equal on all ranks. The descriptions stay on each rank.
"""

import re
from collections.abc import Sequence

_MOST = 8
_contents: dict[str, tuple[str, ...]] = {}


def name_contents(name: str, contents: Sequence[str]) -> None:
    """Sets the tensor names of the collectives with this name."""
    _contents[name] = tuple(contents)


def said(text: str) -> str:
    """Returns " Its tensors are ..." for a message that starts with a described name, else ""."""
    name = text.partition(": ")[0]
    found = _contents.get(name) or _contents.get(re.sub(r"_\d+$", "", name))
    if not found:
        return ""
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f" On this rank its tensors are those of {', '.join(found[:_MOST])}{more}."
