"""Batches that are skipped in a dataset that TensorFlow distributes."""

import tensorflow as tf
from ctl.tensorflow_patches import skipped_batches
from patching import turn_off


def first_number(strategy, count):
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(2))
    assert not hasattr(distributed, "skip")
    skipped_batches.skip_replica_batches(distributed, count)
    return int(strategy.experimental_local_results(next(iter(distributed)))[0][0])


def test_replica_batches_are_skipped(two_replicas):
    assert [first_number(two_replicas, count) for count in (0, 1, 3)] == [0, 1, 3]


def test_it_can_be_turned_off(two_replicas, monkeypatch):
    turn_off(monkeypatch, "skipped_batches")
    assert first_number(two_replicas, 3) == 0
