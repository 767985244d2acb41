"""`ctl.fit`, `ctl.evaluate` and `ctl.predict` accept the types of data that `Model.fit` accepts."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf

NUM_EXAMPLES, SIZE = 37, 8


def arrays():
    x = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)
    x = np.where(x > 0, x, 0)
    return x, x.sum(axis=1, keepdims=True)


def linear_model(sparse=False):
    model = keras.Sequential([keras.Input((4,), sparse=sparse), keras.layers.Dense(1)])
    model.set_weights([np.full((4, 1), 0.1, np.float32), np.zeros(1, np.float32)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def batches(count=10**6):
    """Yields batches of the first 32 examples again and again."""
    x, y = arrays()
    for number in range(count):
        rows = slice(number % 4 * SIZE, number % 4 * SIZE + SIZE)
        yield x[rows], y[rows]


def grain_map_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(*arrays(), strict=True))).batch(SIZE)


def frame(values):
    return pytest.importorskip("pandas").DataFrame(values)


def matrix(values):
    return pytest.importorskip("scipy.sparse").csr_matrix(values)


def cases(functions):
    """Returns the names of cases. Cases with libraries of the extra `slow` are of the second tier."""
    libraries = ("frame", "series", "matrix", "Grain")
    is_slow = {name: any(word in name for word in libraries) for name in functions}
    return [pytest.param(name, marks=[pytest.mark.slow] * is_slow[name]) for name in functions]


X, Y = arrays()
# name -> (function that returns positional arguments of fit, keywords)
CASES = {
    "frames": lambda: ((frame(X.astype("float64")), frame(Y)), {}),
    "a series": lambda: ((frame(X), frame(Y)[0]), dict(validation_data=(frame(X), frame(Y)[0]))),
    "a sparse tensor": lambda: ((tf.sparse.from_dense(X), Y), {}),
    "a sparse matrix": lambda: ((matrix(X), Y), dict(validation_split=0.2)),
    "a Grain MapDataset": lambda: ((grain_map_dataset(),), {}),
    "a Grain IterDataset": lambda: (
        (grain_map_dataset().to_iter_dataset(),), dict(validation_data=grain_map_dataset())),
    "generators": lambda: (
        (batches(),), dict(steps_per_epoch=3, validation_data=batches(), validation_steps=2)),
    "steps instead of a batch size": lambda: (
        (X, Y), dict(batch_size=None, steps_per_epoch=3, validation_data=(X, Y), validation_steps=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(CASES))
def test_fit_has_the_history_of_keras(name):
    results = []
    for fit in (keras.Model.fit, ctl.fit):
        data, options = CASES[name]()
        if isinstance(data[0], np.ndarray) or len(data) == 2:
            options = {"batch_size": SIZE, **options}
        model = linear_model(sparse="sparse" in name)
        results.append(fit(model, *data, epochs=2, shuffle=False, verbose=0, **options).history)
    expected, actual = results
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert actual[key] == pytest.approx(values, rel=1e-5)


EVALUATED = {
    "a generator and steps": lambda: ((batches(),), dict(steps=3)),
    "a generator": lambda: ((batches(5),), {}),
    "a Grain MapDataset": lambda: ((grain_map_dataset(),), {}),
    "arrays and steps": lambda: ((X, Y), dict(steps=3)),
}


@pytest.mark.parametrize("name", cases(EVALUATED))
def test_evaluate_has_the_loss_of_keras(name):
    model = linear_model()
    data, options = EVALUATED[name]()
    expected = model.evaluate(*data, verbose=0, **options)
    data, options = EVALUATED[name]()
    assert ctl.evaluate(model, *data, verbose=0, **options)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_predict_accepts_frames_and_grain_datasets():
    model = linear_model()
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(ctl.predict(model, frame(X)), expected, rtol=1e-5)
    inputs = grain_map_dataset().map(lambda batch: batch[0])
    np.testing.assert_allclose(ctl.predict(model, inputs), expected, rtol=1e-5)


def test_ragged_arrays_train_as_in_keras():
    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [1], [2, 2], [5]])
    targets = np.ones((6, 1), np.float32)

    def history(fit):
        total = keras.layers.Lambda(lambda r: tf.cast(tf.reduce_sum(r, 1, keepdims=True), tf.float32))
        model = keras.Sequential([
            keras.Input((None,), ragged=True, dtype="int32"), total,
            keras.layers.Dense(1, kernel_initializer="ones"),
        ])  # fmt: skip
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return fit(model, rows, targets, epochs=2, batch_size=4, shuffle=False, verbose=0).history["loss"]

    assert history(ctl.fit) == pytest.approx(history(keras.Model.fit), rel=1e-5)
