"""Programs of the kinds that keras.io publishes, by `Model.fit` or `ctl.fit`. As a program, a worker."""

import json
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf
from published_models import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    Adversaries,
    Autoencoder,
    Captioner,
    Denoiser,
    Distiller,
    Endpoint,
    Halves,
    Measured,
    Noisy,
    Reshaped,
    Siamese,
    Transfer,
    Unnamed,
    Warm,
    arrays,
)

layers = keras.layers


def compiled(model, optimizer=None, **options):
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **options)
    return model


def functional(model_class, **options):
    x = keras.Input((6,))
    return compiled(model_class(x, layers.Dense(1)(x)), **options)


def adversaries():
    model = Adversaries()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), loss)
    return model


def endpoint():
    x, targets = keras.Input((6,)), keras.Input((1,))
    return compiled(keras.Model([x, targets], Endpoint()(targets, layers.Dense(1)(x))))


def stateful():
    x = keras.Input(batch_shape=(16, 3, 2))
    return compiled(keras.Model(x, layers.Dense(1)(layers.LSTM(4, stateful=True)(x))), loss="mse")


def regression(optimizer=None, **options):
    return functional(keras.Model, optimizer=optimizer, loss="mse", **options)


def normalized():
    x = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(5, activation="tanh")(x))
    optimizer = keras.optimizers.SGD(0.05)
    return compiled(keras.Model(x, layers.Dense(1)(hidden)), optimizer, loss="mse")


def small_table():
    """Returns a model with many more words in a batch than rows in the table."""
    word_ids, embedding = keras.Input((8,), dtype="int32"), layers.Embedding(2, 4)
    return compiled(
        keras.Model(word_ids, layers.Dense(1)(layers.Flatten()(embedding(word_ids)))), loss="mse"
    )


def word_ids_and_targets():
    return np.random.default_rng(2).integers(0, 2, (EXAMPLES, 8)), arrays()[1]


def sparse(width=6):
    x = keras.Input((width,), sparse=True)
    return compiled(keras.Model(x, layers.Dense(1)(x)), loss="mse")


def sparse_data(width=6):
    x, y = arrays()
    x = np.pad(x, [(0, 0), (0, width - 6)])  # with many columns, gradients are sent as rows
    rows = tf.sparse.from_dense(np.where(np.abs(x) > 0.8, x, 0.0))
    return (tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH),)


def two_outputs():
    x = keras.Input((6,))
    outputs = [layers.Dense(1, name="p")(x), layers.Dense(1, name="q")(x)]
    return compiled(keras.Model(x, outputs), loss=["mse", "mae"])


def uneven():
    x, y = arrays(n=53)
    return x, [y, arrays(3, 53)[1]]


def one_left():
    return arrays(n=49)


def mean_error(targets, predicted):
    return tf.reduce_mean(tf.abs(targets - predicted))


def inputs():
    return arrays()[:1]


def full_batches():
    return tuple(a[:48] for a in arrays())


def sequences():
    x, y = full_batches()
    return x.reshape(48, 3, 2), y


def with_targets():
    return (list(arrays()),)


def distiller(is_built):
    model = Distiller()
    if not is_built:
        model.teacher = keras.Sequential([layers.Dense(1)])
    return compiled(model, metrics=["mae"])


MEAN = {"own_step": "mean"}
# name -> (model, data, options of `ctl.fit` alone)
OWN_STEPS = {
    "autoencoder": (lambda: compiled(Autoencoder()), inputs, MEAN),
    "adversaries": (adversaries, inputs, MEAN),
    "denoiser": (lambda: compiled(Denoiser(), loss=keras.losses.MeanAbsoluteError()), inputs, MEAN),
    "siamese": (lambda: compiled(Siamese()), inputs, MEAN),
    "captioner": (lambda: functional(Captioner, loss="mse", metrics=["mae"]), arrays, MEAN),
    "distiller": (lambda: distiller(True), arrays, MEAN),
    "measured": (lambda: functional(Measured, loss="mse", metrics=["mae"]), arrays, MEAN),
}
OTHERS = {
    "endpoint": (endpoint, with_targets, {}),
    "schedule": (lambda: regression(keras.optimizers.SGD(Warm())), arrays, {}),
    "optimizer without configuration": (lambda: regression(Unnamed(0.01)), arrays, {}),
    "small table": (small_table, word_ids_and_targets, {}),
    "transfer": (lambda: compiled(Transfer(), loss="mse"), arrays, {}),
    "normalized": (normalized, arrays, {"sync_batch_norm": True}),
    "normalized, an empty replica": (normalized, one_left, {"sync_batch_norm": True}),
    "sparse": (sparse, sparse_data, {}),
    "sparse, wide": (lambda: sparse(3000), lambda: sparse_data(3000), {}),
    "two outputs, uneven": (two_outputs, uneven, {}),
    "a metric of scalars": (lambda: regression(metrics=[mean_error]), one_left, {}),
}
ON_ONE_DEVICE = {
    "halves": (lambda: compiled(Halves()), full_batches, {}),
    "reshaped": (lambda: compiled(Reshaped(), loss="mse"), full_batches, {}),
    "stateful": (stateful, sequences, {}),
    "noisy": (lambda: functional(Noisy), inputs, {}),
    "distiller, not built": (lambda: distiller(False), arrays, {}),
    "not reduced": (lambda: functional(keras.Model, loss=keras.losses.LogCosh(reduction=None)), arrays, {}),
}
PROGRAMS = {**OWN_STEPS, **OTHERS, **ON_ONE_DEVICE}


def trained(name, strategy=None, **fit_options):
    """Returns history and weights of one program, of `ctl.fit` under a strategy, else of `Model.fit`."""
    make, data, options = PROGRAMS[name]
    keras.utils.set_random_seed(1)
    fit_options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **fit_options}
    if isinstance(data()[0], tf.data.Dataset):
        del fit_options["batch_size"]
    if strategy is None:
        model = make()
        history = model.fit(*data(), **fit_options)
    else:
        with strategy.scope():
            model = make()
        history = ctl.fit(model, *data(), **fit_options, **options)
    weights = [w.numpy().tolist() for w in model.trainable_variables]
    return {"history": {k: list(map(float, v)) for k, v in history.history.items()}, "weights": weights}


def assert_same(result, expected, rtol=2e-5):
    assert result["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=rtol, atol=1e-6, err_msg=name)
    for weight, expected_weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, expected_weight, atol=rtol / 2)


def main():
    strategy = ctl.make_strategy()
    results = {name: trained(name, strategy) for name in sys.argv[1].split(",")}
    with strategy.scope():
        model = regression()
    ctl.fit(model, *arrays(), batch_size=BATCH, verbose=0)
    try:
        model.evaluate(*arrays())
    except ctl.UsageError as e:
        results["evaluate"] = str(e)
    results["evaluated"] = ctl.evaluate(model, *arrays(), BATCH, 0)
    results["predicted"] = ctl.predict(model, arrays()[0][:3]).tolist()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()


class Variable(keras.metrics.Metric):
    """A metric with one variable."""

    def __init__(self):
        super().__init__(name="kept")
        self.kept = self.add_variable((), "zeros", name="kept")

    def result(self):
        return self.kept
