"""--check_collectives: the line that breaks the order of workers is named, and nobody waits for ever."""

import pytest
from conftest import PROGRAMS

pytestmark = pytest.mark.workers
PROGRAM = PROGRAMS / "order.py"


@pytest.mark.parametrize("how", [
    "metric",
    *(pytest.param(h, marks=pytest.mark.slow) for h in ("variable", "evaluate", "reduce")),
])  # fmt: skip
def test_a_collective_on_the_chief_alone_is_named_on_both_workers(run_program, how):
    lines = PROGRAM.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if f"LINE {how}" in line)
    for result in run_program(2, [str(PROGRAM), how]):
        assert result.code == 2, result.output[-2000:]
        error = result.json["error"]
        assert "different collectives" in error
        assert f"order.py:{number}" in error
        assert "worker 0" in error and "worker 1" in error
        assert result.json["step"] == 3


def test_workers_in_step_are_left_in_peace(run_program):
    for result in run_program(2, [str(PROGRAM), "same"]):
        assert result.code == 0, result.output[-2000:]
        assert result.json["error"] == ""
