"""Distributed tapes, eager and in functions, on any number of ranks."""

import keras
import numpy as np
import tensorflow as tf
from ctl import hvd
from ctl.hvd.errors import RefusedError
from measuring import RequestRecorder, batches, comparable, examples, run

X, Y = examples()


def trained(wrap, in_function):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    chosen = tf.function(step) if in_function else step
    with RequestRecorder() as requests:
        for x, y in batches(X, Y):
            chosen(x, y)
    return {**comparable(model.get_weights()), "asked": requests.names}


def eager():
    return trained(hvd.DistributedGradientTape, in_function=False)


def in_a_function():
    return trained(hvd.DistributedGradientTape, in_function=True)


def opened_distributed():
    """The tape is wrapped before anything is recorded."""
    x = tf.Variable([1.0, 2.0])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        y = tf.reduce_sum(x * x) * float(hvd.rank() + 1)
    return tape.gradient(y, [x])[0].numpy().tolist()


def wrapped_inside_of_its_block():
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x * float(hvd.rank() + 1)
        distributed = hvd.DistributedGradientTape(tape)
    return float(distributed.gradient(y, x))


def persistent_and_watched():
    x = tf.constant(float(hvd.rank()))
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = x * x
    wrapped = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    gradients = [float(wrapped.gradient(y, x)) for _ in range(2)]
    return [*gradients, float(tape.gradient(y, x))]


def structures():
    """Sources in a dictionary. The result is None without a gradient, or zeros if they are requested."""
    a, b = tf.Variable(2.0), tf.Variable(5.0)
    with tf.GradientTape(persistent=True) as tape:
        y = a * a * float(hvd.rank())
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(y, {"a": a, "b": [b]})
    zero = tape.gradient(y, [b], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [float(gradients["a"]), gradients["b"][0] is None, float(zero[0])]


def slices():
    table = tf.Variable(np.ones((4, 2), "float32"))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3]))
    gradient = hvd.DistributedGradientTape(tape).gradient(y, [table])[0]
    return [type(gradient).__name__, tf.convert_to_tensor(gradient)[:, 0].numpy().tolist()]


def local_sources():
    local_variable, global_variable = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        y = (local_variable + global_variable) * 6.0 * float(hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(local_variable)
    local, other = tape.get_local_and_global_gradients(y, [local_variable, global_variable])
    return {
        "all": [float(g) for g in tape.gradient(y, [local_variable, global_variable])],
        "local": [v is local_variable for v, _ in local] + [float(g) for _, g in local],
        "other": [v is global_variable for v, _ in other] + [float(g) for _, g in other],
    }


def partial():
    layer, head = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    for built_layer in (layer, head):
        built_layer.build((None, 1))
        built_layer.kernel.assign([[1.0]])
    with tf.GradientTape() as tape:
        y = head(layer(tf.constant([[float(hvd.rank())]])))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    gradients = tape.gradient(y, [layer.kernel, head.kernel])
    return [float(g[0, 0]) for g in gradients]


def generic_names():
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = x * 2.0
    with RequestRecorder() as requests:
        hvd.DistributedGradientTape(tape).gradient(y, [x], use_generic_names=True)
    return requests.names


def refusals():
    wrong = {
        "adasum": lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum),
        "layers": lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1]),
    }
    results = {}
    for name, attempt in wrong.items():
        try:
            attempt()
            results[name] = "nothing was raised"
        except (ValueError, RefusedError) as e:
            results[name] = str(e)
    return results


run([
    eager, in_a_function, opened_distributed, wrapped_inside_of_its_block, persistent_and_watched,
    structures, slices, local_sources, partial, generic_names, refusals,
])  # fmt: skip
