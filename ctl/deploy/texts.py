"""Manifests as text: the same words for the same options, to the last byte."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctl.errors import UsageError

Document = dict[str, Any]
# Strings that some reader of YAML would take for a number, a date or a truth value
_AMBIGUOUS = re.compile(
    r"[-+]?\.?[0-9][0-9a-zA-Z_.:+-]*|[-+]?\.(inf|nan)|y|n|yes|no|on|off|true|false|null|~|", re.IGNORECASE
)
_WIDTH = 4096  # never wrapped: a word of a command stays on its line


def header(line: str, fill_in: Sequence[str] = ()) -> str:
    """Comment lines: the command line that writes the file again, and what a person has to fill in."""
    lines = [f"# {line}"]
    if fill_in:
        lines += ["#", "# fill in or create first:", *(f"#   {what}" for what in fill_in)]
    return "\n".join(lines) + "\n"


def as_yaml(documents: Iterable[Document], top: str = "") -> str:
    """Documents one below the other, `top` before the first; keys in the order given."""
    dump = _dump()
    return top + "---\n".join(dump(document) for document in documents)


def as_json(document: Mapping[str, Any]) -> str:
    """One document; JSON has no place for a comment."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


@functools.cache
def _dump() -> Callable[[Document], str]:
    """Lists are indented, nothing is an alias, and what could be taken for a number is in quotes."""
    try:
        import yaml
    except ImportError:
        raise UsageError("YAML needs PyYAML; write `pip install 'tf-ctl[deploy]'`, or pyyaml") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = '"' if _AMBIGUOUS.fullmatch(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, string)
    return functools.partial(yaml.dump, Dumper=Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
