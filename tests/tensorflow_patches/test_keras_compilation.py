"""Automatic XLA compilation of Keras 3, which is disabled on several ranks."""

import pytest
from ctl.tensorflow_patches import keras_compilation
from hvd.ranks import results
from keras.src.trainers import trainer
from patching import parameters_of, restore_original, turn_off

FIT = """
import json
import ctl.hvd.keras as hvd
import keras, numpy as np, tensorflow as tf

list_physical_devices = tf.config.list_physical_devices
tf.config.list_physical_devices = lambda kind=None: [
    *list_physical_devices(kind),
    *([tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")] if kind in (None, "GPU") else []),
]
hvd.init()
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones([8, 4], "float32"), np.full([8, 1], hvd.rank(), "float32")
model.fit(x, y, batch_size=4, epochs=1, verbose=0)
weights = hvd.allgather(tf.reshape(model.layers[0].kernel, [1, -1])).numpy()
plain = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
plain.compile(optimizer="sgd", loss="mse")
print(json.dumps({
    "jit": model.jit_compile, "plain": plain.jit_compile, "size": hvd.size(),
    "alike": bool((weights == weights[0]).all()),
}))
"""


def test_a_script_of_several_ranks_fits_where_keras_has_a_gpu():
    expected = {"jit": False, "plain": False, "size": 2, "alike": True}
    assert results(FIT, 2) == [expected] * 2


def test_one_rank_alone_is_compiled_as_before():
    (result,) = results(FIT.replace("model.fit(", "# "), 1)
    assert result["jit"] is True and result["plain"] is True


@pytest.mark.parametrize("disabled", [False, True])
def test_it_can_be_turned_off(disabled, monkeypatch):
    original = restore_original(monkeypatch, trainer.Trainer, "_resolve_auto_jit_compile")
    assert parameters_of(original) == ["self"]
    if disabled:
        turn_off(monkeypatch, "keras_compilation")
    keras_compilation.install_compilation_check(lambda: True)
    assert (trainer.Trainer._resolve_auto_jit_compile is original) == disabled
