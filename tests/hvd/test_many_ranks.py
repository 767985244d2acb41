"""Eleven and more ranks behave as two ranks do: their order is numeric, not alphabetic."""

import pytest
from hvd.ranks import PROGRAMS, results


@pytest.mark.slow  # twelve times TensorFlow on two cores
def test_twelve_ranks():
    records = results(PROGRAMS / "many.py", 12)
    assert [record["rank"] for record in records] == list(range(12))
