"""Docstrings as mkdocstrings reads them: examples in blocks of code; see docs/build_site.py."""

import re
from typing import Any

import griffe

_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+)(?=: )", re.MULTILINE)  # "a, b: what both are"
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Called for each module, class and function."""
        if obj.docstring is not None:
            text = _NAMES.sub(lambda found: found[0].replace(", ", ","), obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```python\n\g<0>\n```", text)
