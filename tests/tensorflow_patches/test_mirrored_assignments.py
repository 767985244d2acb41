"""Assignments of mirrored variables in replica context."""

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import mirrored_assignments
from patching import parameters_of, restore_original, turn_off
from tensorflow.python.distribute import values


@pytest.fixture(autouse=True)
def original(monkeypatch):
    function = restore_original(monkeypatch, values.MirroredVariable, "_update_replica")
    assert parameters_of(function) == ["self", "update_fn", "value", "kwargs"]


def assign_number_of_replica(strategy):
    """Returns the values of a variable on all replicas after each has assigned its number."""
    with strategy.scope():
        variable = tf.Variable(-1, trainable=False)

    @tf.function
    def run():
        strategy.run(lambda: variable.assign(tf.distribute.get_replica_context().replica_id_in_sync_group))

    run()
    return variable, [int(part) for part in strategy.experimental_local_results(variable)]


def test_without_the_patch_replicas_get_different_values(two_replicas, monkeypatch):
    turn_off(monkeypatch, "mirrored_assignments")
    checked = []
    mirrored_assignments.check_assignments(lambda variable, value: checked.append(variable))
    assert assign_number_of_replica(two_replicas)[1] == [0, 1]
    assert not checked


def test_each_assignment_is_checked_first(two_replicas):
    checked = []
    mirrored_assignments.check_assignments(lambda variable, value: checked.append(variable))
    variable, _ = assign_number_of_replica(two_replicas)
    assert checked == [variable, variable]


def test_an_error_of_the_check_is_raised_by_the_step(two_replicas):
    def refuse(variable, value):
        raise ValueError("refused")

    mirrored_assignments.check_assignments(refuse)
    with pytest.raises(ValueError, match="refused"):
        assign_number_of_replica(two_replicas)


def test_the_handle_is_that_of_the_replica(two_replicas):
    with two_replicas.scope():
        variable = tf.Variable(1.0)

    @tf.function
    def run():
        def step():
            graph = tf.compat.v1.get_default_graph()
            handle = mirrored_assignments.captured_handle(variable, graph)
            assert handle.dtype == tf.resource and handle.graph is graph
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

        return two_replicas.run(step)

    assert two_replicas.reduce("sum", run(), axis=None).numpy() == 2.0
