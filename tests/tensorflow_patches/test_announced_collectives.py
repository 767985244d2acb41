"""A function is called before each collective; two workers compare them in tests/workers."""

import contextlib

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import announced_collectives
from patching import parameters_of, restore_original, turn_off
from tensorflow.python.distribute import cross_device_ops, cross_device_utils
from tensorflow.python.ops import collective_ops


@pytest.fixture
def announcements(monkeypatch):
    """A list of the announced collectives after `install()`, between marks of their reductions."""
    reduction, launcher = cross_device_ops.CollectiveAllReduce, cross_device_utils.CollectiveReplicaLauncher
    original = restore_original(monkeypatch, reduction, "_all_reduce_per_replica_values")
    assert parameters_of(original) == ["self", "reduce_op", "per_replica_values", "options"]
    for method in announced_collectives.LAUNCHER_METHODS:
        original = restore_original(monkeypatch, launcher, method)
        assert parameters_of(original)[:2] == ["self", "input_tensor"]
    for function in announced_collectives.BROADCASTS:
        restore_original(monkeypatch, collective_ops, function)
    entries = []

    @contextlib.contextmanager
    def around():
        entries.append("begin")
        yield
        entries.append("end")

    def install():
        announced_collectives.announce_collectives(lambda *arguments: entries.append(arguments), around)
        return entries

    return install


def sum_over(strategy):
    def replica():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.constant([1.0, 2.0]))

    return strategy.experimental_local_results(tf.function(lambda: strategy.run(replica))())


def test_a_sum_is_announced_once_for_all_devices_of_a_worker(announcements, two_replicas):
    entries = announcements()
    assert sum_over(two_replicas)[0].numpy().tolist() == [2.0, 4.0]
    assert [entry for entry in entries if isinstance(entry, tuple)] == [("all_reduce", [2], "float32")]


def test_a_reduction_is_within_the_context(announcements, two_replicas):
    entries = announcements()
    values = tf.function(lambda: two_replicas.run(lambda: tf.constant([1.0])))()
    operations = two_replicas.extended._cross_device_ops
    total = operations.reduce(tf.distribute.ReduceOp.SUM, values, destinations=values)
    assert two_replicas.experimental_local_results(total)[0].numpy() == [2.0]
    assert entries[0] == "begin" and entries[-1] == "end"


def test_broadcasts_are_announced(announcements):
    entries = announcements()
    with pytest.raises(TypeError):
        collective_ops.broadcast_send()
    assert entries == [("broadcast of a new variable",)]


def test_it_can_be_turned_off(announcements, two_replicas, monkeypatch):
    turn_off(monkeypatch, "announced_collectives")
    entries = announcements()
    sum_over(two_replicas)
    assert not entries
