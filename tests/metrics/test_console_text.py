"""Formats of numbers, rates and durations on the console."""

import pytest
from ctl.metrics.console_text import format_duration, format_number, format_rate


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.230119, "0.2301"),
        (1.0, "1"),
        (12_345.6, "12,346"),
        (1.2e-5, "1.2e-05"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (3, "3"),
        (1e12, "1e+12"),
        ("a", "a"),
    ],
)
def test_numbers_have_four_digits(value, expected):
    assert format_number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.4217, "0.422"),
        (412.3, "412"),
        (999.7, "1000"),
        (4120.0, "4120"),
        (9996.0, "9996"),
        (52_710.0, "52.7k"),
        (999_900.0, "1M"),
        (1.31e6, "1.31M"),
        (float("inf"), "inf"),
    ],
)
def test_rates_have_three_digits(value, expected):
    assert format_rate(value) == expected


@pytest.mark.parametrize(
    ("secs", "expected"),
    [
        (0.4, "0:00"),
        (59.7, "1:00"),
        (3599.9, "1:00:00"),
        (90_061, "25:01:01"),
        (None, "-:--"),
        (float("inf"), "-:--"),
    ],
)
def test_durations_read_like_a_clock(secs, expected):
    assert format_duration(secs) == expected
