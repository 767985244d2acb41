"""Launchers of the collectives of a strategy; two workers use the engine in tests/workers."""

import inspect
import re

import pytest
import tensorflow as tf
from ctl.distribute.engine_all_reduce import _Launcher
from ctl.tensorflow_patches import collective_launchers
from patching import parameters_of, turn_off
from tensorflow.python.distribute import cross_device_ops, cross_device_utils

METHODS = {
    "can_order_nccl": [], "all_reduce": ["input_tensor", "control_input", "options"],
    "batch_all_reduce": ["input_tensor_packs", "options"],
    "all_gather": ["input_tensor", "axis", "options"],
    "all_reduce_indexed_slices": ["input_slices", "options"],
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_launcher_of_the_engine_has_the_methods_of_tensorflow_s(method):
    for launcher in (cross_device_utils.CollectiveReplicaLauncher, _Launcher):
        assert parameters_of(getattr(launcher, method)) == ["self", *METHODS[method]]


def test_tensorflow_calls_no_further_method_of_a_launcher():
    source = inspect.getsource(cross_device_ops.CollectiveAllReduce)
    called = re.findall(r"launchers?(?:\[\w+\])?\.(\w+)\(", source)
    assert {"batch_all_reduce", "all_reduce_indexed_slices", "all_gather"} <= {*called}
    assert {*called} <= {*METHODS, "append"}


def test_the_launchers_are_replaced_and_restored():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert collective_launchers.can_replace_launchers(strategy)
    owners = [strategy.extended._cross_device_ops, strategy.extended._host_cross_device_ops]
    originals = [owner._launchers for owner in owners]
    launcher = object()
    collective_launchers.replace_launchers(strategy, launcher)
    assert [owner._launchers for owner in owners] == [[launcher], [launcher]]
    collective_launchers.replace_launchers(strategy, None)
    assert [owner._launchers for owner in owners] == originals


def test_it_can_be_turned_off(monkeypatch):
    turn_off(monkeypatch, "collective_launchers")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert not collective_launchers.can_replace_launchers(strategy)


def test_other_strategies_cannot_replace_them():
    assert not collective_launchers.can_replace_launchers(tf.distribute.get_strategy())
