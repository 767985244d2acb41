"""What the tensors of a collective are called here, for the sentence of an error about it.

Only names of collectives travel, and are the same on all ranks; what is in them each rank knows itself.
"""

import re
from collections.abc import Sequence

_MOST = 8
_contents: dict[str, tuple[str, ...]] = {}


def name_contents(name: str, contents: Sequence[str]) -> None:
    """The tensors of the collectives of this name, from now on."""
    _contents[name] = tuple(contents)


def said(text: str) -> str:
    """ " Its tensors are ..." for a text that begins with a name that was described; else nothing."""
    name = text.partition(": ")[0]
    found = _contents.get(name) or _contents.get(re.sub(r"_\d+$", "", name))
    if not found:
        return ""
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f" On this rank its tensors are those of {', '.join(found[:_MOST])}{more}."
