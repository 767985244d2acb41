"""tf_keras (Keras 2) trains on any number of ranks, with new and with legacy optimizers."""

import tempfile

import ctl.hvd.keras as hvd
import tensorflow as tf
import tf_keras
from measuring import RequestRecorder, batches, comparable, examples, run, shared

X, Y = examples()
legacy = tf_keras.optimizers.legacy


def network():
    tf_keras.utils.set_random_seed(7)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(8, activation="tanh", input_shape=(5,)), tf_keras.layers.Dense(3)]
    )


def fitted(optimizer):
    model = network()
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    x, y = shared(X, Y)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    with RequestRecorder() as requests:
        model.fit(
            x, y, batch_size=12 // hvd.size(), shuffle=False, epochs=2, verbose=0, callbacks=callbacks
        )
    return {**comparable(model.get_weights()), "exchanges": len(requests.gradients())}


def new_fit():
    return fitted(tf_keras.optimizers.SGD(0.1, momentum=0.9))


def legacy_fit():
    return fitted(legacy.Adam(0.01))


def looped(optimizer, **options):
    model = network()
    optimizer = hvd.DistributedOptimizer(optimizer, **options)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with RequestRecorder() as requests:
        for x, y in batches(X, Y):
            step(x, y)
    return {
        **comparable(model.get_weights()),
        "exchanges": len(requests.gradients()),
        "iterations": int(optimizer.iterations),
    }


def new_loop():
    return looped(tf_keras.optimizers.RMSprop(0.01))


def legacy_passes():
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    return looped(legacy.SGD(0.1, momentum=0.9), **options)


def legacy_loss_scale():
    model = network()
    optimizer = hvd.DistributedOptimizer(legacy.SGD(0.1))
    model.compile(tf_keras.mixed_precision.LossScaleOptimizer(optimizer), "mse")
    for x, y in batches(X, Y):
        model.train_on_batch(x, y)
    return comparable(model.get_weights())


def saved_and_loaded():
    model = network()
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.25, momentum=0.9)), "mse")
    model.train_on_batch(X, Y)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder + "/model.keras")
        loaded = hvd.load_model(folder + "/model.keras")
    results = {
        "rate": float(loaded.optimizer.learning_rate.numpy()),
        "iterations": int(loaded.optimizer.iterations),
    }
    with RequestRecorder() as requests:
        loaded.train_on_batch(X, Y)
    return {**results, "exchanges": len(requests.gradients())}


run([new_fit, legacy_fit, new_loop, legacy_passes, legacy_loss_scale, saved_and_loaded])
