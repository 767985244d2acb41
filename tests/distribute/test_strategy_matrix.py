"""Every strategy, framework and optimizer gives the numbers of float64 NumPy, and the page says so."""

import matrix
import numpy as np
import pytest
from conftest import ROOT, environment, some_of

BEGIN = "<!-- measured: written by docs/generate_strategies.py -->"
END = "<!-- end of what was measured -->"
IN_SLOW = {"one_device", "multi_worker, 2 workers", "multi_worker, chief and 1 worker"}  # near to others
CHEAP = [row for row, (_, job, _) in matrix.ROWS.items() if job is None]
WORKERS = [row for row in matrix.ROWS if row not in CHEAP]


def cell_of(row):
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    measured = page.split(BEGIN)[1].split(END)[0].replace("\n  ", " ")
    items = [line.removeprefix("- ").split(": ", 1) for line in measured.strip().splitlines()]
    (found,) = [verdict for verdict, rows in items if row in rows.split("; ")]
    return found


FEW = [("keras3", "adam"), ("tf_keras", "sgd"), ("module", "adam")]  # each framework, both optimizers
OTHERS = [column for column in matrix.COLUMNS if column not in FEW]
both_parts = pytest.mark.parametrize("columns", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)],
                                     ids=["few", "others"])  # fmt: skip


def check(row, tmp_path, columns):
    cells = matrix.run_row(row, tmp_path, environment(), columns)
    assert cells == ["exact"] * len(columns)
    assert matrix.cell(cells) == cell_of(row), "measure again: python docs/generate_strategies.py"


@pytest.mark.parametrize("row", some_of(CHEAP, *{*CHEAP} - IN_SLOW))
@both_parts
def test_one_process_is_exact(row, tmp_path, columns):
    check(row, tmp_path, columns)


@pytest.mark.workers
@pytest.mark.parametrize("row", some_of(WORKERS, *{*WORKERS} - IN_SLOW))
@both_parts
def test_several_processes_are_exact(row, tmp_path, columns):
    check(row, tmp_path, columns)


def test_the_reference_learns_and_tells_what_is_off():
    from small_models import initial_weights

    expected = matrix.reference("adam")
    assert np.abs(expected[0] - initial_weights()[0]).max() > 0.05
    off = [w + (2e-5 if i == 1 else 0) for i, w in enumerate(expected)]
    assert matrix.verdict(off, expected) == "off by 2e-05"
    assert matrix.verdict([w + 9e-6 for w in expected], expected) == "exact"
