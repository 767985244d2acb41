"""Eleven ranks and more do what two do: their order is that of numbers, not of words."""

import pytest
from hvd.ranks import PROGRAMS, results


@pytest.mark.slow  # twelve times TensorFlow on two cores
def test_twelve_ranks():
    said = results(PROGRAMS / "many.py", 12, timeout_secs=500)
    assert [one["rank"] for one in said] == list(range(12))
