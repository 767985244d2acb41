"""An exception of a signal handler during an eager collective."""

import pytest


@pytest.mark.workers
def test_an_interrupted_call_is_completed_and_later_collectives_work(run_program):
    (result,) = run_program(1, ["tests/programs/interrupted_call.py"])
    first, second = result.json["ranks"]
    assert first["is_interrupted"] and first["repeats"] and second["repeats"]
    assert first["totals"] == [3072, 3072] and second["totals"] == [3072, 3072, 3072]
