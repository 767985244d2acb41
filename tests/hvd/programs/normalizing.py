"""Synchronized batch normalization, by Keras 3 or by tf_keras if TF_USE_LEGACY_KERAS is set."""

import numpy as np
import tensorflow as tf
from ctl import hvd
from measuring import run

numbers = np.random.default_rng(0)
X = (numbers.normal(size=(12, 4, 3)) * 2 + 1).astype("float32")
WEIGHTS = numbers.normal(size=X.shape).astype("float32")
ENDS = {1: [12], 2: [4, 12], 3: [3, 4, 12]}  # batches of ranks differ in size


def shard_of(array):
    ends = ENDS[hvd.size()]
    return array[([0, *ends])[hvd.rank()] : ends[hvd.rank()]]


def normalized(in_function):
    layer = hvd.SyncBatchNormalization(epsilon=1e-3, momentum=0.5)
    x = tf.constant(shard_of(X))
    layer.build(X.shape)

    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * y * shard_of(WEIGHTS))
        return y, *tape.gradient(loss, [x, layer.gamma, layer.beta])

    y, of_x, of_gamma, of_beta = (tf.function(step) if in_function else step)()
    return {
        "y": y.numpy().tolist(),
        "of_x": of_x.numpy().tolist(),
        "of_gamma": of_gamma.numpy().tolist(),
        "of_beta": of_beta.numpy().tolist(),
        "mean": np.asarray(layer.moving_mean).tolist(),
        "variance": np.asarray(layer.moving_variance).tolist(),
    }


def eager():
    return normalized(in_function=False)


def in_a_function():
    return normalized(in_function=True)


def inference():
    layer = hvd.SyncBatchNormalization(fused=None)
    return np.asarray(layer(shard_of(X), training=False))[0, 0].tolist()


def masked():
    """Only masked-in values are counted."""
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    mask = np.arange(48).reshape(12, 4) % 3 > 0
    layer(shard_of(X), training=True, mask=tf.constant(shard_of(mask)))
    return {"layer": np.asarray(layer.moving_mean).tolist(), "all": X[mask].mean(0).tolist()}


def a_copy_by_its_config():
    layer = hvd.SyncBatchNormalization(momentum=0.7, name="ours")
    saved = tf.keras.layers.serialize(layer)
    return [type(tf.keras.layers.deserialize(saved)).__name__, float(layer.momentum)]


def refusal():
    try:
        hvd.SyncBatchNormalization(fused=True)
    except ValueError as e:
        return str(e)
    return "nothing was raised"


run([eager, in_a_function, inference, masked, a_copy_by_its_config, refusal])
