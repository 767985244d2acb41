"""The sum of sparse gradients where replicas cannot merge their calls, as on GPUs in a compiled step."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from ctl.step.reducers.sparse_rows import SparseSum

LENGTH = 6
INDICES = ([0, 2, 2], [2, 5, 0])  # by replica


@pytest.mark.parametrize("merge", [True, False])
def test_each_replica_gets_the_sum_of_all_rows(merge, monkeypatch):
    monkeypatch.setattr(tf.__internal__.distribute, "strategy_supports_no_merge_call", lambda: True)
    generator, sent = np.random.default_rng(0), []
    values = [generator.normal(size=(3, 2)).astype(np.float32) for _ in INDICES]

    def summed(replica, all_reduce):
        context = SimpleNamespace(replica_id_in_sync_group=replica, all_reduce=all_reduce)
        monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
        rows = tf.IndexedSlices(tf.constant(values[replica]), tf.constant(INDICES[replica], tf.int64))
        return SparseSum([rows], [LENGTH], 2, merge=merge, even=True).summed()

    summed(1, lambda op, rows: sent.append(rows) or rows)
    [total] = summed(0, lambda op, rows: rows + sent[0])
    expected = np.zeros([LENGTH, 2], np.float32)
    for indices, part in zip(INDICES, values, strict=True):
        np.add.at(expected, indices, part)
    actual = tf.math.unsorted_segment_sum(total.values, total.indices, LENGTH)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert len(total.indices) == (3 if merge else 6)
