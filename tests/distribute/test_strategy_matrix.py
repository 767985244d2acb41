"""Numbers of every strategy, framework and optimizer, compared with float64 NumPy and with the page."""

import matrix
import numpy as np
import pytest
from conftest import ROOT, environment, some_of

BEGIN_MARKER = "<!-- measured: written by docs/generate_strategies.py -->"
END_MARKER = "<!-- end of the measured list -->"
SLOW_ROWS = {"one_device", "multi_worker, 2 workers", "multi_worker, chief and 1 worker"}  # like others
SINGLE_PROCESS_ROWS = [row for row, (_, job, _) in matrix.ROWS.items() if job is None]
MULTI_WORKER_ROWS = [row for row in matrix.ROWS if row not in SINGLE_PROCESS_ROWS]


def cell_of(row):
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    measured = page.split(BEGIN_MARKER)[1].split(END_MARKER)[0].replace("\n  ", " ")
    items = [line.removeprefix("- ").split(": ", 1) for line in measured.strip().splitlines()]
    (measured_verdict,) = [verdict for verdict, rows in items if row in rows.split("; ")]
    return measured_verdict


# each framework and both optimizers
FAST_COLUMNS = [("keras3", "adam"), ("tf_keras", "sgd"), ("module", "adam")]
SLOW_COLUMNS = [column for column in matrix.COLUMNS if column not in FAST_COLUMNS]
both_parts = pytest.mark.parametrize(
    "columns", [FAST_COLUMNS, pytest.param(SLOW_COLUMNS, marks=pytest.mark.slow)], ids=["few", "others"]
)


def check_row(row, tmp_path, columns):
    cells = matrix.run_row(row, tmp_path, environment(), columns)
    assert cells == ["exact"] * len(columns)
    assert matrix.cell(cells) == cell_of(row), "measure again: python docs/generate_strategies.py"


@pytest.mark.parametrize("row", some_of(SINGLE_PROCESS_ROWS, *{*SINGLE_PROCESS_ROWS} - SLOW_ROWS))
@both_parts
def test_one_process_is_exact(row, tmp_path, columns):
    check_row(row, tmp_path, columns)


@pytest.mark.workers
@pytest.mark.parametrize("row", some_of(MULTI_WORKER_ROWS, *{*MULTI_WORKER_ROWS} - SLOW_ROWS))
@both_parts
def test_several_processes_are_exact(row, tmp_path, columns):
    check_row(row, tmp_path, columns)


def test_the_reference_learns_and_the_verdict_contains_the_difference():
    from small_models import initial_weights

    expected = matrix.reference("adam")
    assert np.abs(expected[0] - initial_weights()[0]).max() > 0.05
    changed_weights = [w + (2e-5 if i == 1 else 0) for i, w in enumerate(expected)]
    assert matrix.verdict(changed_weights, expected) == "off by 2e-05"
    assert matrix.verdict([w + 9e-6 for w in expected], expected) == "exact"
