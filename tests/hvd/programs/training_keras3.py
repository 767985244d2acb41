"""Keras 3 training on any number of ranks. The output is compared with one process."""

import copy
import dataclasses
import pickle
import sys
import tempfile

import ctl.hvd.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from ctl.hvd import process
from ctl.hvd.errors import RefusedError
from measuring import RequestRecorder, batches, comparable, examples, run, shared

X, Y = examples()


def network():
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.layers.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )


def fitted(optimizer, compiled=(), **options):
    model = network()
    model.compile(hvd.DistributedOptimizer(optimizer, **options), "mse", **dict(compiled))
    x, y = shared(X, Y)
    model.fit(x, y, batch_size=12 // hvd.size(), shuffle=False, epochs=2, verbose=0)
    return comparable(model.get_weights())


def fit_with_momentum():
    return fitted(keras.optimizers.SGD(0.1, momentum=0.9))


def fit_with_adam_and_clipping():
    return fitted(keras.optimizers.Adam(0.01, global_clipnorm=0.3, weight_decay=0.01))


def fit_with_a_schedule():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return fitted(keras.optimizers.SGD(rate))


def fit_in_loops_of_steps():
    return fitted(keras.optimizers.SGD(0.1), {"steps_per_execution": 2})


def fit_eagerly():
    return fitted(keras.optimizers.SGD(0.1), {"run_eagerly": True}, backward_passes_per_step=2)


def fit_predivided_in_groups():
    return fitted(keras.optimizers.SGD(0.1), gradient_predivide_factor=2.0, groups=2)


def loop(optimizer, steps=4, **options):
    model = network()
    optimizer = hvd.DistributedOptimizer(optimizer, **options)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with RequestRecorder() as requests:
        for x, y in batches(X, Y)[:steps]:
            step(x, y)
    return model, optimizer, requests


def custom_loop():
    model, optimizer, requests = loop(keras.optimizers.RMSprop(0.01))
    called = len(optimizer.variables()) == len(optimizer.variables)
    return {
        **comparable(model.get_weights()),
        "exchanges": len(requests.gradients()),
        "called": called,
        "iterations": int(optimizer.iterations),
    }


def several_passes():
    """Two micro-batches per update: as many updates, and the same, as with batches twice as large."""
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model, optimizer, requests = loop(keras.optimizers.SGD(0.1, momentum=0.9), **options)
    large = network()
    large.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    for x, y in batches(X, Y, global_batch_size=24):
        large.train_on_batch(x, y)
    return {
        **comparable(model.get_weights()),
        "large": comparable(large.get_weights())["numbers"],
        "exchanges": len(requests.gradients()),
        "iterations": int(optimizer.iterations),
    }


def a_sum_of_passes_in_fit():
    return fitted(keras.optimizers.SGD(0.02), backward_passes_per_step=3)


def exchanges_per_step():
    def count(**options):
        return len(loop(keras.optimizers.SGD(0.1), steps=1, **options)[2].gradients())

    counts = {"fused": count(), "two groups": count(groups=2)}
    model = network()
    counts["listed"] = count(groups=[[model.trainable_variables[0]]])
    engine = process.engine()
    as_started = engine.settings
    for max_bytes in (130, 0):  # [5, 8] is 160 bytes, [8] 32, [8, 3] 96, [3] 12
        engine.settings = dataclasses.replace(as_started, fusion_threshold=max_bytes)
        counts[f"{max_bytes} bytes"] = count()
    engine.settings = as_started
    return counts


def embedding(**options):
    keras.utils.set_random_seed(3)
    word_ids = np.random.default_rng(1).integers(0, 20, size=(24, 4))
    model = keras.Sequential([keras.layers.Embedding(20, 3), keras.layers.Flatten()])
    model.build((None, 4))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.1), **options)
    kinds = set()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        kinds.update(type(g).__name__ for g in gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for (x,) in batches(word_ids):
        step(x)
    return {**comparable(model.get_weights()), "kinds": sorted(kinds)}


def sparse_gradients():
    return embedding()


def sparse_gradients_as_dense():
    return embedding(sparse_as_dense=True)


def a_variable_without_gradient():
    used, unused = keras.Variable([1.0, 2.0]), keras.Variable([3.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.apply([tf.constant([float(hvd.rank()), 1.0]), None], [used, unused])
    return [*used.numpy().tolist(), *unused.numpy().tolist()]


def a_local_variable():
    local_variable, global_variable = keras.Variable([0.0]), keras.Variable([0.0])
    for scaled in (True, False):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scaled)
        optimizer.register_local_var(local_variable)
        gradient = tf.constant([-6.0 * (hvd.rank() + 1)])
        optimizer.apply([gradient, gradient], [local_variable, global_variable])
    return [float(local_variable.numpy()[0]), float(global_variable.numpy()[0])]


def compressed():
    """Values that underflow in float16 arrive as zero, unless ranks share memory."""
    values = []
    fp16, engine = hvd.Compression.fp16, process.engine()
    for compression, has_network in ((hvd.Compression.none, True), (fp16, True), (fp16, False)):
        engine.all_share_memory = not has_network
        weight = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        optimizer.apply([tf.constant([1e-9])], [weight])
        values.append(float(weight.numpy()[0]) == 0.0)
    return values


def mixed_precision_with_an_overflow_on_one_rank():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse")
        for number, (x, y) in enumerate(batches(X, Y)):
            is_invalid = number == 1 and hvd.rank() == hvd.size() - 1
            model.train_on_batch(x * np.inf if is_invalid else x, y)
        is_same_optimizer = model.optimizer is optimizer
    finally:
        keras.config.set_dtype_policy("float32")
    return {
        **comparable(model.get_weights()),
        "same": is_same_optimizer,
        "scale": float(optimizer.dynamic_scale),
        "iterations": int(optimizer.iterations),
        "finite": bool(np.isfinite(model.get_weights()[0]).all()),
    }


def state_of_the_wrapped_optimizer_goes_on():
    weight = keras.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer.apply([tf.constant([-1.0])], [weight])
    wrapped = hvd.DistributedOptimizer(optimizer)
    wrapped.apply([tf.constant([-1.0])], [weight])
    return {"weight": float(weight.numpy()[0]), "iterations": int(wrapped.iterations)}


def saved_and_loaded():
    model = network()
    loss = keras.losses.MeanSquaredError()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.25, momentum=0.9)), loss)
    model.train_on_batch(X, Y)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for ending in (".keras", ".h5"):
            model.save(folder + "/model" + ending)
            loaded_by_keras = keras.models.load_model(folder + "/model" + ending)
            loaded = hvd.load_model(folder + "/model" + ending)
            state = [v.numpy() for v in loaded.optimizer.variables]
            results[ending] = {
                "plain": type(loaded_by_keras.optimizer) is keras.optimizers.SGD,
                "rate": float(loaded.optimizer.learning_rate.numpy()),
                "iterations": int(loaded.optimizer.iterations),
                "momentum kept": bool(np.any(state[-1])),
                "exchanges": len(exchanged(loaded).gradients()),
            }
    return results


def exchanged(model):
    with RequestRecorder() as requests:
        model.train_on_batch(X, Y)
    return requests


def copies_are_distributed_too():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5), name="ours")
    copies = [
        type(optimizer).from_config(optimizer.get_config()),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ]
    with RequestRecorder() as requests:
        for each in copies:
            each.apply([tf.constant([1.0])], [keras.Variable([0.0])])
    return {
        "config": all(each.get_config() == optimizer.get_config() for each in copies),
        "names": requests.names,
        "is adam": isinstance(optimizer, keras.optimizers.Adam),
    }


def models_that_differ():
    """In fit, on every rank: one line that names the variables."""
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3 + hvd.rank(), name="top")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    try:
        model.fit(X[:4], np.zeros((4, 3 + hvd.rank())), verbose=0)
    except tf.errors.FailedPreconditionError as e:
        return str(e)
    return "nothing was raised"


def refusals():
    sgd = keras.optimizers.SGD(0.1)
    wrong = {
        "twice": lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd)),
        "adasum": lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum),
        "min": lambda: hvd.DistributedOptimizer(sgd, op=hvd.Min),
        "name": lambda: hvd.DistributedOptimizer("sgd"),
        "passes": lambda: hvd.DistributedOptimizer(sgd, backward_passes_per_step=0),
        "predivided sum": lambda: hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0),
        "no groups": lambda: hvd.DistributedOptimizer(sgd, groups=0),
        "inside out": lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd)),
        "sparse passes": lambda: embedding(backward_passes_per_step=2),
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
    fit_with_momentum, fit_with_adam_and_clipping, fit_with_a_schedule, fit_in_loops_of_steps,
    fit_eagerly, fit_predivided_in_groups,
    custom_loop, several_passes, a_sum_of_passes_in_fit, exchanges_per_step, sparse_gradients,
    sparse_gradients_as_dense, a_variable_without_gradient, a_local_variable, compressed,
    mixed_precision_with_an_overflow_on_one_rank, state_of_the_wrapped_optimizer_goes_on,
    saved_and_loaded, copies_are_distributed_too, models_that_differ,
    refusals,
], sys.argv[1:])  # fmt: skip
