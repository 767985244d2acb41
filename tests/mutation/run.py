"""Mutations of core files, and whether the single-process tests detect them. Run by hand.

    python tests/mutation/run.py --count=200 --seed=1

Each mutation changes one operator, constant or condition, or removes one statement, in a copy of the
repository. The tests of that file run until the first failure. Prints a line for each mutation, the share
that was detected, and the survivors. Exit code 1 if less than 85 % were detected.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("step", "data", "training", "checkpoints", "callbacks", "keras")
EXPECTED_SHARE = 0.85
TIMEOUT_SECS = 600
_PAIRS = (
    (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or),
)  # fmt: skip
OPERATORS = {ast.Div: ast.Mult, **dict(_PAIRS), **{second: first for first, second in _PAIRS}}


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
      path: of the file, relative to the repository.
      line: number of the changed line.
      change: description.
      source: the changed content of the file.
    """

    path: Path
    line: int
    change: str
    source: str


def candidates(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], str]]]:
    """Yields nodes and functions that change a copy of the node in place and return a description."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPERATORS:
            yield node, _replace_operator
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            yield node, _replace_comparison
        elif isinstance(node, (ast.If, ast.While)) and not _is_type_checking(node):
            yield node, _negate
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            yield node, _replace_constant
        elif isinstance(node, (ast.Expr, ast.AugAssign)) and not _is_docstring(node):
            yield node, _remove


def _is_type_checking(node: ast.If | ast.While) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _replace_operator(node) -> str:
    before = type(node.op)
    node.op = OPERATORS[before]()
    return f"{before.__name__} -> {type(node.op).__name__}"


def _replace_comparison(node) -> str:
    before = type(node.ops[0])
    node.ops[0] = OPERATORS[before]()
    return f"{before.__name__} -> {type(node.ops[0]).__name__}"


def _negate(node) -> str:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return "condition negated"


def _replace_constant(node) -> str:
    before = node.value
    node.value = not before if isinstance(before, bool) else before + 1
    return f"{before} -> {node.value}"


def _remove(node) -> str:
    text = ast.unparse(node)
    node.value = ast.Constant(None)
    if isinstance(node, ast.AugAssign):
        node.op, node.value = ast.Add(), ast.Constant(0)
    return f"removed: {text.splitlines()[0][:60]}"


def mutations(path: Path) -> list[tuple[int, int]]:
    """Returns the numbers and lines of all candidates in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return [(number, node.lineno) for number, (node, _) in enumerate(candidates(tree))]


def mutate(path: Path, number: int) -> Mutation:
    """Returns a file with its candidate of this number changed."""
    tree = copy.deepcopy(ast.parse((ROOT / path).read_text()))
    node, change = list(candidates(tree))[number]
    line = node.lineno
    description = change(node)
    return Mutation(path, line, description, ast.unparse(ast.fix_missing_locations(tree)))


def tests_of(path: Path) -> list[str]:
    """Returns the test files that name the module, else those of its folder."""
    module, folder = path.stem, path.parent.name
    pattern = re.compile(rf"ctl\.{folder}\.{module}\b|from ctl\.{folder} import .*\b{module}\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    naming = [f for f in files if f.stem.startswith(f"test_{module}") or pattern.search(f.read_text())]
    in_folder = [f for f in files if f.parent.name == folder and f not in naming]
    chosen = [f for f in naming if f.parent.name != "workers"] or in_folder
    return [str(f.relative_to(ROOT)) for f in chosen]


def fails(path: Path, source: str, copied: Path) -> bool:
    """Returns True if the tests of a file with other content fail, in a copy of the repository."""
    target = copied / path
    original = target.read_text()
    target.write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m",
               "not workers and not slow and not cluster", *tests_of(path)]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, check=False, cwd=copied, env=environ, capture_output=True, timeout=TIMEOUT_SECS
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, choices=FOLDERS)
    given = parser.parse_args()
    paths = [p.relative_to(ROOT) for f in given.folders for p in sorted((ROOT / "ctl" / f).glob("*.py"))]
    places = [(path, number) for path in paths for number, _ in mutations(path)]
    chosen = random.Random(given.seed).sample(places, min(given.count, len(places)))
    survivors, num_tried = [], 0
    broken: dict[Path, bool] = {}  # files whose tests fail without a mutation
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copied = Path(directory) / "repository"
        shutil.copytree(
            ROOT, copied, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs")
        )
        for path, number in chosen:
            if path not in broken:
                unchanged = ast.unparse(ast.parse((ROOT / path).read_text()))
                broken[path] = fails(path, unchanged, copied)
            mutation = mutate(path, number)
            where = f"{mutation.path}:{mutation.line}  {mutation.change}"
            if broken[path]:
                print(f"not tried, as its tests fail without a mutation: {where}", flush=True)
                continue
            num_tried += 1
            is_detected = fails(path, mutation.source, copied)
            print(f"{'detected' if is_detected else 'SURVIVED'}  {where}", flush=True)
            if not is_detected:
                survivors.append(where)
    share = 1 - len(survivors) / max(1, num_tried)
    print(f"\n{num_tried - len(survivors)} of {num_tried} detected ({share:.0%})", *survivors, sep="\n")
    return 0 if share >= EXPECTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
