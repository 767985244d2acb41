"""Tables of the weights of a model."""

import pytest
from ctl.metrics.parameters import ParameterTotal, parameter_rows, parameter_total

WEIGHTS = [(f"layer_{i}", (i + 1, 2), "float32", True) for i in range(6)]


@pytest.mark.parametrize(
    ("max_rows", "names"),
    [
        (6, ["layer_0", "layer_1", "layer_2", "layer_3", "layer_4", "layer_5"]),
        (5, ["layer_0", "layer_1", "... 2 more ...", "layer_4", "layer_5"]),
        (4, ["layer_0", "layer_1", "... 3 more ...", "layer_5"]),
    ],
)
def test_one_row_replaces_the_weights_in_the_middle_of_a_long_table(max_rows, names):
    rows = parameter_rows(WEIGHTS, max_rows)
    assert [name for name, _, _ in rows] == names
    assert sum(int(count) for _, _, count in rows) == 42


def test_shapes_and_counts_are_text():
    weights = [("kernel", (784, 128), "float32", True), ("scale", (), "float32", True)]
    assert parameter_rows(weights, 9) == [("kernel", "784 x 128", "100,352"), ("scale", "scalar", "1")]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("float32", 40), ("bfloat16", 20), ("float8_e4m3fn", 10), ("int4", 5), ("bool", 10), ("string", 0)],
)
def test_the_size_depends_on_the_dtype(dtype, num_bytes):
    weights = [("a", (8,), dtype, True), ("b", (2,), dtype, False)]
    assert parameter_total(weights) == ParameterTotal(10, 8, num_bytes)
