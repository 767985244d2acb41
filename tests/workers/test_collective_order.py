"""--check_collectives: an error names the line with a collective of one worker; no worker blocks."""

import pytest
from conftest import PROGRAMS

pytestmark = pytest.mark.workers
PROGRAM = PROGRAMS / "order.py"


@pytest.mark.parametrize("case", [
    "metric",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("variable", "evaluate", "reduce")),
])  # fmt: skip
def test_a_collective_on_the_chief_alone_is_named_on_both_workers(run_program, case):
    lines = PROGRAM.read_text().splitlines()
    line_number = next(i for i, line in enumerate(lines, 1) if f"LINE {case}" in line)
    for result in run_program(2, [str(PROGRAM), case]):
        assert result.code == 2, result.output[-2000:]
        error = result.json["error"]
        assert "different collectives" in error
        assert f"order.py:{line_number}" in error
        assert "worker 0" in error and "worker 1" in error
        assert result.json["step"] == 3


def test_workers_with_the_same_collectives_run_without_an_error(run_program):
    for result in run_program(2, [str(PROGRAM), "same"]):
        assert result.code == 0, result.output[-2000:]
        assert result.json["error"] == ""
