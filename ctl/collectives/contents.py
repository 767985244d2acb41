"""Names of the tensors of collectives, for error messages.

The ranks exchange only the names of collectives, which are equal on all ranks. Each rank keeps the names of
its own tensors in this module.
"""

import re
from collections.abc import Sequence

_MAX_NAMES = 8
_contents: dict[str, tuple[str, ...]] = {}


def set_tensor_names(name: str, contents: Sequence[str]) -> None:
    """Stores the tensor names of the collectives with this name."""
    _contents[name] = tuple(contents)


def describe_tensors(text: str) -> str:
    """Returns a sentence about the tensors of a collective.

    Args:
      text: Error message that starts with the name of the collective and a colon.

    Returns:
      The sentence, with a space before it, or "" if no tensor names are stored.
    """
    name = text.partition(": ")[0]
    tensor_names = _contents.get(name) or _contents.get(re.sub(r"_\d+$", "", name))
    if not tensor_names:
        return ""
    suffix = f" and {len(tensor_names) - _MAX_NAMES} more" if len(tensor_names) > _MAX_NAMES else ""
    return f" On this rank it contains the tensors of {', '.join(tensor_names[:_MAX_NAMES])}{suffix}."
