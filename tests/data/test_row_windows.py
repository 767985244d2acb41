"""Windows of rows, compared with the batches of the same data."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.data import row_windows


def batches_of(windows, steps):
    batches = []
    for part in windows.segments(steps):
        rows = part.window.numpy()[part.first :][: part.steps * part.size]
        batches += [batch.tolist() for batch in rows.reshape(part.steps, part.size)]
    return batches


@pytest.mark.parametrize(("array_options", "start", "total"), [
    ({}, 0, None), ({}, 28, None), ({"shuffle": False}, 4, None), ({"seed": 3}, 8, 61),
    ({"epochs_apart": True}, 0, 48), ({"epochs_apart": True}, 32, 48), ({"epochs_apart": True}, 20, None),
])  # fmt: skip
def test_segments_are_the_batches_of_the_pipeline(monkeypatch, array_options, start, total):
    monkeypatch.setattr(row_windows, "_MAX_ROWS", 12)  # three batches begin in a window
    data = ctl.from_arrays(np.arange(22), 4, **array_options)
    options = {"seed": 7, "start": start, "total": total}
    pipeline = data.replica_batches(replicas=range(1), num_replicas=1, **options)
    windows = data.windows(device=None, **options)
    expected = [batch.numpy().tolist() for batch in pipeline.take(12)]
    assert batches_of(windows, 5) == expected[:5]
    assert batches_of(windows, 7) == expected[5:]
    assert {len(batch) for batch in expected} == set(windows.sizes) & {*map(len, expected)}


def test_functions_have_the_same_arguments_and_results_as_in_a_pipeline():
    def listed(x, y):
        return [x, y]

    data = ctl.from_arrays({"x": np.arange(6), "y": np.arange(6) * 10}, 3, shuffle=False)
    data = data.map(lambda batch: (batch["x"], batch["y"])).map(listed)
    data = data.map(lambda x, y: {"sum": x + y, "both": [x, y]})
    (expected,) = data.replica_batches(seed=0, start=0, total=3, replicas=range(1), num_replicas=1)
    windows = data.windows(seed=0, start=0, total=3, device=None)
    gathered = row_windows.gather_batch(windows.arrays, tf.range(3), windows.functions)
    assert gathered.keys() == expected.keys()
    for name in gathered:
        np.testing.assert_array_equal(gathered[name], expected[name])
