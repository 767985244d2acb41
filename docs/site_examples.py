"""Docstrings as mkdocstrings reads them: examples in blocks of code; see docs/build_site.py."""

import re
from typing import Any

import griffe

# "a, b: description" and its further lines, which are indented deeper
_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Called for each module, class and function."""
        if obj.docstring is not None:
            text = _NAMES.sub(one_entry_per_name, obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```python\n\g<0>\n```", text)


def one_entry_per_name(match: re.Match) -> str:
    """Returns an entry for each name, because griffe finds no type for a pair of names."""
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}{description}" for name in names.split(", "))
