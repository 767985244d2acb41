r"""Generation of manifests from the files of templates/.

`<name>` in a template is a placeholder. Lines from `#if name` to `#end` are kept if the value is true,
lines after `#else` if it is false. Entries with the value None are omitted. YAML is parsed before values
are inserted, and written by a serializer, so no value can change the structure.

fill_document("vertex_worker_pool.yaml", values)   -> {"machineSpec": {"machineType": "n1-standard-4"}, ...}
fill_text("Dockerfile", values)               -> "FROM python:3.11-slim-bookworm\n..."
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ctl.errors import UsageError

Document = dict[str, Any]
Values = Mapping[str, Any]
_PLACEHOLDER = re.compile("<([a-z_]+)>")
_TEMPLATES = Path(__file__).parent / "templates"
# Strings that some YAML parsers read as a number, a date or a boolean
_AMBIGUOUS = re.compile(
    r"[-+]?\.?[0-9][0-9a-zA-Z_.:+-]*|[-+]?\.(inf|nan)|y|n|yes|no|on|off|true|false|null|~|", re.IGNORECASE
)
_WIDTH = 4096  # lines are not wrapped, so an argument of a command stays on its line


def fill_text(template: str, values: Values) -> str:
    """Returns the text of a template that is not YAML. A line with a value that is None is omitted.

    Values are inserted unchanged: the caller quotes them for the shell or as JSON.
    """
    lines = _select_lines(template, values)
    selected_lines = [
        line for line in lines if all(values[name] is not None for name in _PLACEHOLDER.findall(line))
    ]
    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), "".join(selected_lines))


def fill_documents(template: str, values: Values) -> list[Document]:
    """Returns the documents of a YAML template. A mapping or list that loses all its entries is omitted."""
    parsed = _import_yaml().safe_load_all("".join(_select_lines(template, values)))
    return [_fill_node(document, values) for document in parsed if document is not None]


def fill_document(template: str, values: Values) -> Document:
    """Returns the only document of a YAML template."""
    [only_document] = fill_documents(template, values)
    return only_document


def file_header(line: str, fill_in: Sequence[str] = ()) -> str:
    """Returns comment lines: the command line that generates the file, and the values to fill in."""
    lines = [f"# {line}"]
    if fill_in:
        lines += ["#", "# fill in or create first:", *(f"#   {item}" for item in fill_in)]
    return "\n".join(lines) + "\n"


def as_yaml(documents: Iterable[Document], header: str = "") -> str:
    """Returns YAML of several documents, with `header` before the first. Keys keep their order."""
    dump = _yaml_dumper()
    return header + "---\n".join(dump(document) for document in documents)


def as_json(document: Mapping[str, Any]) -> str:
    """Returns JSON of one document. JSON has no comments."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _select_lines(template: str, values: Values) -> list[str]:
    """Returns the lines of a template without the blocks with a false condition."""
    selected: list[str] = []
    conditions = [True]
    for line in (_TEMPLATES / template).read_text(encoding="utf-8").splitlines(keepends=True):
        directive, _, name = line.strip().partition(" ")
        if directive == "#if":
            conditions.append(bool(values[name]))
        elif directive == "#else":
            conditions[-1] = not conditions[-1]
        elif directive == "#end":
            conditions.pop()
        elif all(conditions):
            selected.append(line)
    return selected


def _fill_node(node: Any, values: Values) -> Any:
    """Returns a node of parsed YAML with its values inserted, or None if the node is omitted."""
    if isinstance(node, dict):
        entries = {key: _fill_node(value, values) for key, value in node.items()}
        remaining = {key: value for key, value in entries.items() if value is not None}
        return remaining if remaining or not node else None
    if isinstance(node, list):
        items = [item for item in (_fill_node(item, values) for item in node) if item is not None]
        return items if items or not node else None
    if isinstance(node, str):
        placeholder = _PLACEHOLDER.fullmatch(node)
        return (
            values[placeholder[1]]
            if placeholder
            else _PLACEHOLDER.sub(lambda match: str(values[match[1]]), node)
        )
    return node


def _import_yaml() -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "YAML output requires PyYAML; run `pip install 'tf-ctl[deploy]'` or `pip install pyyaml`"
        ) from None
    return yaml


@functools.cache
def _yaml_dumper() -> Callable[[Document], str]:
    """Returns a dump function that indents lists, writes no aliases and quotes ambiguous strings."""
    yaml = _import_yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def string(dumper: Any, text: str) -> Any:
        style = '"' if _AMBIGUOUS.fullmatch(text) else "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, string)
    return functools.partial(yaml.dump, Dumper=Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
