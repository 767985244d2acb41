"""Arguments of wrong types are refused by functions of `ctl.hvd` before anything is exchanged."""

import re

import ctl
import ctl.hvd as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

TENSOR = tf.ones([2])
SLICES = tf.IndexedSlices(TENSOR, [0, 1], [2])
WITH_PROCESS_SET = {
    "allreduce": lambda **options: hvd.allreduce(TENSOR, **options),
    "grouped_allreduce": lambda **options: hvd.grouped_allreduce([TENSOR], **options),
    "allreduce of slices": lambda **options: hvd.allreduce(SLICES, **options),
    "allgather": lambda **options: hvd.allgather(TENSOR, **options),
    "broadcast": lambda **options: hvd.broadcast(TENSOR, 0, **options),
    "alltoall": lambda **options: hvd.alltoall(TENSOR, **options),
    "reducescatter": lambda **options: hvd.reducescatter(TENSOR, **options),
    "barrier": hvd.barrier,
    "broadcast_object": lambda **options: hvd.broadcast_object({}, 0, **options),
    "allgather_object": lambda **options: hvd.allgather_object({}, **options),
    "broadcast_variables": lambda **options: hvd.broadcast_variables([tf.Variable(1.0)], 0, **options),
    "DistributedOptimizer": lambda **options: hvd.DistributedOptimizer(keras.optimizers.SGD(), **options),
    "DistributedGradientTape": lambda **options: hvd.DistributedGradientTape(tf.GradientTape(), **options),
}
WITH_COMPRESSION = ["allreduce", "reducescatter", "DistributedOptimizer", "DistributedGradientTape"]
OF_GRADIENTS = ["DistributedOptimizer", "DistributedGradientTape"]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("name", WITH_PROCESS_SET)
def test_a_list_of_ranks_is_no_process_set(name):
    for value in ([0], "all", 0, object()) + ((None,) if "object" not in name else ()):
        message = re.escape(f"process_set is {value!r:.80}; expected a hvd.ProcessSet, such as")
        with pytest.raises(ctl.UsageError, match=message):
            WITH_PROCESS_SET[name](process_set=value)
    WITH_PROCESS_SET[name](process_set=hvd.global_process_set)


@pytest.mark.parametrize("name", WITH_COMPRESSION)
def test_a_name_is_no_compression(name):
    for value in ("fp16", None, tf.float16):
        with pytest.raises(ctl.UsageError, match="compression is .*; expected hvd.Compression.none, .fp16"):
            WITH_PROCESS_SET[name](compression=value)
    WITH_PROCESS_SET[name](compression=hvd.Compression.fp16)


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_options_of_gradients_are_checked_before_the_first_step(name):
    distributed = WITH_PROCESS_SET[name]
    for value in ("2", None, [], np.nan):
        message = "gradient_predivide_factor is .*; expected a number"
        with pytest.raises(ctl.UsageError, match=message):
            distributed(gradient_predivide_factor=value)
    for value in ("2", 0, -1, 1.5, object()):
        with pytest.raises(ctl.UsageError, match="groups is .*; expected a number of groups above 0, or"):
            distributed(groups=value)
    with pytest.raises(ValueError, match=r"op is \[\]; expected hvd.Average"):
        distributed(op=[])
    distributed(gradient_predivide_factor=np.float32(2), groups=[[tf.Variable(1.0)]])


@pytest.mark.parametrize("value", ["2", 1.5, None, 0, True, object()])
def test_the_number_of_backward_passes_is_a_whole_number(value):
    with pytest.raises(ctl.UsageError, match="backward_passes_per_step is .*; expected a whole number"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=value)


@pytest.mark.parametrize("value", ["tape", None, keras.optimizers.SGD()])
def test_a_gradient_tape_is_required(value):
    with pytest.raises(ctl.UsageError, match="DistributedGradientTape got .*; expected the tf.Gradient"):
        hvd.DistributedGradientTape(value)


def test_a_model_or_one_variable_is_no_list_of_variables():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for value in (model, tf.Variable(1.0), tf.Variable([1.0]), "kernel", [1.0], None):
        with pytest.raises(ctl.UsageError, match="expected a list of variables, e.g. model.variables"):
            hvd.broadcast_variables(value, 0)
    hvd.broadcast_variables(model.variables, 0)
    hvd.broadcast_variables(iter(model.variables), 0)
    hvd.broadcast_variables([], 0)
