"""Measures of the structure of the code. test_structure.py limits them.

python tests/measures.py
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("training", "step", "data", "checkpoints", "metrics", "callbacks")
BUILT_ON = (*CORE, "profiling", "evaluator", "parameter_server")  # folders of the third form
VAGUE_NAMES = {
    *("found", "known", "mine", "made", "own", "seen", "wanted", "said", "how", "place", "more", "rest"),
    *("done", "word", "words", "thing", "things", "told", "others", "whole", "where", "kind", "given"),
}
UNCLEAR = re.compile(
    r"^(What|Those|Who|Whether)\b|\b(nobody|somebody|nothing|the rest|whose own)\b"
    r"|\b(tells?|told|says?|said|asks?|asked|knows?|known|sees?|looks?|meets?|speaks?|wants?)\b"
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files_of(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / "ctl" / folder).rglob("*.py"))]


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def outside_assignments(path: Path) -> list[str]:
    """Returns the attributes that a file assigns on objects other than `self` and `cls`, as "a.b"."""
    assigned = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                assigned.append(f"{owner}.{node.attr}")
    return sorted(assigned)


def functions_with(parameter: str, paths: list[Path]) -> list[str]:
    """Returns the names of the functions with a parameter."""
    names = []
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names += [node.name] if parameter in {argument.arg for argument in arguments} else []
    return names


@functools.cache
def docstrings(path: Path) -> list[str]:
    node_types = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree_of(path)) if isinstance(node, node_types)]
    return [text for text in texts if text]


def comments(path: Path) -> list[str]:
    return re.findall(r"(?:^|  )# (.*)$", path.read_text(), re.MULTILINE)


def unclear_phrases(path: Path) -> int:
    """Returns the number of vague variable names, and of unclear phrases in docstrings and comments."""
    nodes = list(ast.walk(tree_of(path)))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    texts = [*docstrings(path), *comments(path)]
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.:])\s+", text)]
    return len(names & VAGUE_NAMES) + sum(bool(UNCLEAR.search(sentence)) for sentence in sentences)


@functools.cache
def unclear_by_folder() -> Counter:
    """Returns folder of ctl/, or "" for the files of its root -> number of unclear phrases."""
    counts: Counter = Counter()
    for path in sorted((ROOT / "ctl").rglob("*.py")):
        parts = path.relative_to(ROOT / "ctl").parts
        counts[parts[0] if len(parts) > 1 else ""] += unclear_phrases(path)
    return counts


def main() -> None:
    core = [ROOT / "ctl" / "trainer.py", *files_of(*CORE)]
    runs = [ROOT / "ctl" / "trainer.py", ROOT / "ctl" / "app.py", *files_of("training")]
    assigned = [name for path in files_of("training", "step") for name in outside_assignments(path)]
    print(f"lines of ctl/: {num_lines(sorted((ROOT / 'ctl').rglob('*.py')))}")
    print(f"lines of the core: {num_lines(core)}")
    print(f"assignments to attributes of other objects in training/ and step/: {len(assigned)}")
    print(f"functions with a parameter `trainer`: {len(functions_with('trainer', runs))}")
    for folder, count in sorted(unclear_by_folder().items()):
        print(f"unclear phrases in ctl/{folder}: {count}")


if __name__ == "__main__":
    main()
