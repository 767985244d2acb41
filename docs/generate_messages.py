"""Writes docs/messages.md: errors, log lines, printed lines and help texts of ctl/, for proofreading.

    python docs/generate_messages.py

Values that a message contains are shown as {expression}.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "messages.md"
LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical")
HELP_KEYWORDS = ("help", "description", "epilog", "usage")
HEAD = """# Messages

All errors, log lines, printed lines and help texts, by file. `python docs/generate_messages.py` writes this
page from the source, for proofreading; a value in a message is shown as `{expression}`.
"""


def text_of(node: ast.AST | None) -> str:
    """Returns the text of a string expression, or "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        is_text = [isinstance(v, ast.Constant) for v in node.values]
        parts = zip(node.values, is_text, strict=True)
        return "".join(v.value if text else f"{{{_source(v.value)}}}" for v, text in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
        return "".join(p or "{...}" for p in parts) if any(parts) else ""
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, [text_of(node.body), text_of(node.orelse)]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text_of(node.func.value)
    return ""


def _source(node: ast.AST) -> str:
    """Returns the source of an expression in the form of Python 3.11, also with Python 3.10."""
    return re.sub(r"\bfor \(([^()]+)\) in", r"for \1 in", ast.unparse(node))


def messages_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind and text of each message of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            yield from ((node.lineno, name, text_of(a)) for a in node.exc.args)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in LOG_METHODS or name == "warn":
                yield from ((node.lineno, name, text_of(a)) for a in node.args[:1])
            elif name == "print" or (name == "write" and "std" in ast.unparse(node.func)):
                yield from ((node.lineno, "print", text_of(a)) for a in node.args)
            elif name.startswith("DEFINE_") or name in ("_field", "UsageError", "PeerLostError"):
                category = name if name.endswith("Error") else "help"
                yield from ((node.lineno, category, text_of(a)) for a in node.args)
            for keyword in node.keywords:
                if keyword.arg in HELP_KEYWORDS:
                    yield node.lineno, "help", text_of(keyword.value)
        elif isinstance(node, (ast.Return, ast.Assign, ast.AugAssign)):
            text = text_of(node.value)
            if text.count(" ") > 3:  # a sentence that is used elsewhere
                yield node.lineno, "text", text


def page() -> str:
    """Returns the text of docs/messages.md."""
    parts = [HEAD]
    for path in sorted((ROOT / "ctl").rglob("*.py")):
        rows, texts = [], set()
        for _, category, text in sorted(messages_of(ast.parse(path.read_text()))):
            sentence = " ".join(text.split())
            if len(sentence) > 1 and " " in sentence and sentence not in texts:
                texts.add(sentence)
                rows.append(f"- {category}: `{sentence.replace('`', chr(39))}`")
        if rows:
            parts.append(f"## {path.relative_to(ROOT)}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
