"""Mutations of core files, and a check that the tests of the first tier detect them. Run by hand.

    python tests/mutation/run.py --count=200 --seed=1

Runs the first tier once and records the lines that each test executes, in its own process and in others.
Then each mutation changes one operator, constant or condition, or removes one statement, in a copy of the
repository, and tests that execute the changed lines run until the first failure. Prints a line for each
mutation, the detected share, and the survivors. The exit code is 1 if less than 85 % were detected.
"""

import argparse
import ast
import collections
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage
import keras  # noqa: F401  before the fork
import pytest
import tensorflow as tf  # noqa: F401
import tf_keras  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("step", "data", "training", "checkpoints", "callbacks", "keras")
EXPECTED_SHARE = 0.85
RECORDING_SECS, TIMEOUT_SECS = 7200, 300
MAX_TESTS, MAX_PROGRAMS = 80, 4  # for a mutation: tests in one process, tests that start processes
LOG = "pytest.log"
FIRST_TIER = "(not workers or smoke) and not slow and not cluster"  # as in the Makefile
EQUIVALENT = ("frozen", "kw_only", "strict")  # arguments that only reject wrong code
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
      lines: numbers of the changed lines.
      change: description.
      source: the changed content of the file.
    """

    path: Path
    lines: range
    change: str
    source: str


def candidates(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], str]]]:
    """Yields nodes and functions that change a copy of the node in place and return a description."""
    skipped = {id(k.value) for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg in EQUIVALENT}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
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


def num_mutations(path: Path) -> int:
    """Returns how many candidates a file has."""
    return sum(1 for _ in candidates(ast.parse((ROOT / path).read_text())))


def mutate(path: Path, number: int) -> Mutation:
    """Returns a file with its candidate of this number changed."""
    tree = ast.parse((ROOT / path).read_text())
    node, change = list(candidates(tree))[number]
    lines = range(node.lineno, node.lineno + 1)  # a statement with a body is run where it begins
    if not isinstance(node, (ast.If, ast.While)):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    description = change(node)
    return Mutation(path, lines, description, ast.unparse(ast.fix_missing_locations(tree)))


class TestsOfLines:
    """Index from lines to the tests that execute them.

    Args:
      record: Coverage data of a run. Contexts are "test|phase" in the process of pytest, and "test (phase)"
        in the processes that a test starts.
    """

    def __init__(self, record: Path):
        self._data = coverage.CoverageData(str(record))
        self._data.read()
        self.failed = set(record.with_suffix(".failed").read_text().splitlines())
        self._root = next(f for f in self._data.measured_files() if f.endswith("/ctl/trainer.py"))[:-14]
        self._num_lines: collections.Counter[str] = collections.Counter()  # of ctl/, by test
        for file in self._data.measured_files():
            for contexts in self._data.contexts_by_lineno(file).values():
                self._num_lines.update({_test_of(context) for context in contexts})

    def of(self, path: Path, lines: range) -> list[str]:
        """Returns tests that execute one of the lines, from as many test files as possible.

        A line that runs at import has the tests of all lines of its file.
        """
        by_line = self._data.contexts_by_lineno(self._root + str(path))
        contexts = {context for line in lines for context in by_line.get(line, ())}
        if any(not context or context.startswith("|") for context in contexts):
            contexts.update(context for line_contexts in by_line.values() for context in line_contexts)
        inner = {_test_of(context) for context in contexts if "|" in context} - {"", *self.failed}
        outer = {_test_of(context) for context in contexts if "|" not in context} - {"", *self.failed}
        folder = f"tests/{path.parts[1]}/"
        return [
            *self._by_turns(inner, folder)[:MAX_TESTS],
            *self._by_turns(outer - inner, folder)[:MAX_PROGRAMS],
        ]

    def _by_turns(self, tests: set[str], folder: str) -> list[str]:
        """Returns the narrowest test of each file, then the second ones, and so on, `folder` first."""
        by_file: dict[str, list[str]] = collections.defaultdict(list)
        for test in sorted(tests, key=lambda t: (self._num_lines[t], t)):
            by_file[test.partition("::")[0]].append(test)
        turns = [(i, test) for of_file in by_file.values() for i, test in enumerate(of_file)]
        return [test for _, test in sorted(turns, key=lambda t: (t[0], not t[1].startswith(folder), t[1]))]


def _test_of(context: str) -> str:
    return context.rpartition("|")[0] if "|" in context else context.rpartition(" (")[0]


def exit_code_of(copied: Path, arguments: list[str], timeout_secs: float = TIMEOUT_SECS) -> int | None:
    """Returns pytest's exit code in a copy of the repository; None after a timeout.

    pytest runs in a fork of this process, which has imported TensorFlow but not ctl.
    """
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(copied, arguments))
    process.start()
    process.join(timeout_secs)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def run_pytest(copied: Path, arguments: list[str]) -> None:
    """Runs pytest, which writes to LOG in the copy; ends this process with its exit code."""
    os.chdir(copied)
    os.environ.update(PYTHONPATH=str(copied))
    sys.path[0] = str(copied)
    sys.dont_write_bytecode = True
    with open(LOG, "w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    os._exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))


def record_tests(copied: Path, record: Path) -> None:
    """Runs the first tier once; writes which test runs which line, and a list of the tests that failed."""
    print("running the tests once without a mutation", flush=True)
    config = "[run]\nsource = ctl\nparallel = true\n"
    inner, outer = copied / "inner.cfg", copied / "outer.cfg"
    inner.write_text(config)
    outer.write_text(
        f"{config}context = ${{PYTEST_CURRENT_TEST-}}\npatch = _exit, fork\ndata_file = {copied}/.outer"
    )
    os.environ["COVERAGE_PROCESS_START"] = str(outer)  # of the processes that tests start
    measuring = ["--cov", f"--cov-config={inner}", "--cov-context=test", "--cov-report="]
    options = ["-m", FIRST_TIER, "--hypothesis-profile=quick", *measuring]
    code = exit_code_of(copied, options, RECORDING_SECS)
    log = (copied / LOG).read_text()
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}, expected 0 or 1:\n{log[-3000:]}")
    del os.environ["COVERAGE_PROCESS_START"]
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", log, re.MULTILINE)
    combined = coverage.Coverage(data_file=str(record), config_file=False)
    combined.combine([str(copied / ".coverage"), *map(str, copied.glob(".outer.*"))], strict=True)
    combined.save()
    record.with_suffix(".failed").write_text("\n".join(failed))


def is_detected(mutation: Mutation, tests: list[str], copied: Path) -> bool:
    """Returns True if one of the tests fails with the mutation, in a copy of the repository."""
    target = copied / mutation.path
    original = target.read_text()
    target.write_text(mutation.source)
    try:
        return bool(tests) and exit_code_of(copied, ["-x", "-m", "", *tests]) != 0
    finally:
        target.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, choices=FOLDERS)
    parser.add_argument("--record", type=Path, help="the record of an earlier run, which is left here")
    flags = parser.parse_args()
    paths = [p.relative_to(ROOT) for f in flags.folders for p in sorted((ROOT / "ctl" / f).glob("*.py"))]
    candidate_numbers = [(path, number) for path in paths for number in range(num_mutations(path))]
    chosen = random.Random(flags.seed).sample(candidate_numbers, min(flags.count, len(candidate_numbers)))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copied = Path(directory) / "repository"
        shutil.copytree(
            ROOT, copied, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs")
        )
        record = flags.record or Path(directory) / "record"
        if not record.exists():
            record_tests(copied, record)
        tests_of_lines = TestsOfLines(record)
        print("skipped, as they fail:", *sorted(tests_of_lines.failed), sep="\n  ", flush=True)
        for path, number in chosen:
            mutation = mutate(path, number)
            tests = tests_of_lines.of(path, mutation.lines)
            detected = is_detected(mutation, tests, copied)
            where = f"{path}:{mutation.lines.start}  {mutation.change}"
            print(f"{'detected' if detected else 'SURVIVED'}  {where}  ({len(tests)} tests)", flush=True)
            if not detected:
                survivors.append(where)
    share = 1 - len(survivors) / len(chosen)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} detected ({share:.0%})", *survivors, sep="\n")
    return 0 if share >= EXPECTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
