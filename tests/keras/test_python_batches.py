"""`ctl.fit` with a PyDataset or a generator has the numbers of `Model.fit`."""

import random

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.keras.class_weights import class_weights
from fitting import BATCH, classifier, numbers


class Shuffled(keras.utils.PyDataset):
    """Data that change their order between epochs with a fixed seed. Records the calls."""

    def __init__(self, *arrays, wrap=list, **options):
        super().__init__(**options)
        self.arrays, self.wrap, self.calls = arrays, wrap, []
        self.order, self.random = np.arange(len(arrays[0])), np.random.default_rng(0)

    def __len__(self):
        return (len(self.order) + BATCH - 1) // BATCH

    def __getitem__(self, index):
        self.calls.append(index)
        rows = self.order[BATCH * index : BATCH * (index + 1)]
        return self.wrap(a[rows] for a in self.arrays)

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.random.shuffle(self.order)


class Endless(Shuffled):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return super().__getitem__(index % 6)

    def on_epoch_end(self):
        """Keeps the order, because batches are prefetched."""


def generate_batches():
    x, y, _ = numbers()
    for i in range(0, 9 * 48, BATCH):
        yield x[i % 48 : i % 48 + BATCH], y[i % 48 : i % 48 + BATCH]


def with_input_name(batch):
    x, y = batch
    return {"x": x}, y


def model_with_input_name():
    x = keras.Input((6,), name="x")
    model = keras.Model({"x": x}, keras.layers.Dense(3)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


CASES = {
    "weights, threads": (lambda: Shuffled(*numbers(), workers=3), classifier, {}),
    "validation": (lambda: Shuffled(*numbers()[:2]), classifier,
                   {"validation_data": lambda: Shuffled(*numbers(7, 21)[:2])}),
    "names": (lambda: Shuffled(*numbers()[:2], wrap=with_input_name), model_with_input_name, {}),
    "endless": (lambda: Endless(*numbers()[:2]), classifier,
                {"steps_per_epoch": 4, "class_weight": {0: 0.5}}),
    "generator": (generate_batches, classifier, {"steps_per_epoch": 5}),
}  # fmt: skip
ON_REPLICAS = "weights, threads, two replicas"


def trained(case, fit, strategy=None):
    make, model_of, options = CASES[case]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = model_of()
    data = make()
    history = fit(model, data, epochs=3, verbose=0, **{"shuffle": False, **options}).history
    return history, model.get_weights(), getattr(data, "calls", [])


@pytest.fixture(scope="module")
def pair():
    return ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("case", some_of([*CASES, ON_REPLICAS], "endless", "validation", ON_REPLICAS))
def test_batches_of_python_code_train_as_by_model_fit(case, pair):
    strategy, case = (pair, "weights, threads") if case == ON_REPLICAS else (None, case)
    expected, weights, calls = trained(case, keras.Model.fit)
    history, actual_weights, actual_calls = trained(case, ctl.fit, strategy)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-5, err_msg=name)
    for a, b in zip(actual_weights, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    if case == "validation":
        assert actual_calls[actual_calls.index("end") :] == calls[calls.index("end") :]


def order_of(**options):
    data = Shuffled(*numbers()[:2])
    data.random = random.Random()
    data.random.shuffle = lambda order: None
    ctl.fit(classifier(), data, epochs=2, verbose=0, **options)
    begins = [i for i, call in enumerate(data.calls) if call == "begin"]
    return [data.calls[i + 1 : i + 8] for i in begins]


def test_shuffling_changes_the_order_of_the_batches_from_epoch_to_epoch_by_the_seed():
    first, second = order_of(seed=0)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second and first != list(range(7))
    assert order_of(seed=0) == [first, second] != order_of(seed=1)


def test_a_resumed_run_continues_with_the_next_batch(tmp_path):
    def run(directory, epochs):
        keras.utils.set_random_seed(1)
        model = classifier()
        ctl.fit(model, Shuffled(*numbers()[:2]), epochs=epochs, verbose=0, model_dir=directory)
        return model.get_weights()

    uninterrupted = run(None, 4)
    run(tmp_path, 2)
    for a, b in zip(run(tmp_path, 4), uninterrupted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("steps", some_of([2, 3], 2))
def test_each_evaluation_reads_the_same_batches_of_a_generator(steps):
    rows_and_values = [(2, 5.0), (4, 1.0), (2, 2.0)]
    batches = ((np.full((rows, 1), value), np.zeros((rows, 1))) for rows, value in rows_and_values)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", loss="mae")
    zeros = np.zeros((8, 1), np.float32)
    history = ctl.fit(model, zeros, zeros, batch_size=4, epochs=3, verbose=0, validation_data=batches,
                      validation_steps=steps)  # fmt: skip
    assert history.history["val_loss"] == pytest.approx(3 * [14 / 6 if steps == 2 else 18 / 8])


def test_a_generator_without_batches_cannot_validate():
    x, y, _ = numbers()
    with pytest.raises(ctl.UsageError, match="a generator that yields no batch"):
        ctl.fit(classifier(), x, y, verbose=0, validation_data=(b for b in ()), validation_steps=1)


def test_a_generator_with_checkpoints_is_warned_of(tmp_path, caplog):
    ctl.fit(classifier(), generate_batches(), steps_per_epoch=2, verbose=0)
    assert "rewound" not in caplog.text
    ctl.fit(classifier(), generate_batches(), steps_per_epoch=2, verbose=0, model_dir=tmp_path)
    assert "x is a generator, which cannot be rewound" in caplog.text


def test_evaluate_takes_a_pydataset():
    x, y, _ = numbers()
    model = classifier()
    metrics = ctl.evaluate(model, Shuffled(x, y))
    assert metrics == pytest.approx(model.evaluate(x, y, verbose=0, return_dict=True), abs=1e-5)


def test_a_batch_without_sample_weights_may_end_with_none():
    x, y, _ = numbers()
    losses = []
    for wrap in (tuple, lambda arrays: (*arrays, None)):
        keras.utils.set_random_seed(1)
        losses.append(ctl.fit(classifier(), Shuffled(x, y, wrap=wrap), verbose=0).history["loss"])
    assert losses[0] == losses[1]


class NoDataset:
    """A sequence of batches that is no PyDataset."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


X, Y, _ = numbers()
REFUSED = {
    "another class": (NoDataset, {}, "has to be a subclass of keras.utils.PyDataset"),
    "no length": (generate_batches, {}, "length is unknown; give steps_per_epoch"),
    "endless": (lambda: Endless(X, Y), {}, "without a length; give steps_per_epoch"),
    "a function": (lambda: generate_batches, {"steps_per_epoch": 1},
                   r"Call the function: generate_batches\(\)"),
    "targets": (lambda: Shuffled(X, Y), {"y": Y}, "contains the targets and weights"),
    "four parts": (lambda: Shuffled(X, Y, Y, Y), {}, "a tuple of 4 parts"),
    "no batch": (lambda: Shuffled(X[:0], Y[:0]), {}, "has the length 0"),
    "validation": (lambda: Shuffled(X, Y), {"validation_data": generate_batches()},
                   "give validation_steps"),
    "no batches": (lambda: (batch for batch in ()), {"steps_per_epoch": 1}, "yields no batch"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_data_without_batches_are_refused_with_a_sentence(case):
    make, options, message = REFUSED[case]
    with pytest.raises(ctl.UsageError, match=message):
        ctl.fit(classifier(), make(), verbose=0, **options)


class Pooling(keras.Model):
    """A model without variables before its first call. Inputs `[b, t, 3]`, outputs `[b, 1]`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(keras.ops.mean(x, axis=1))


def batches_of_two(lengths):
    for number, length in enumerate(lengths):
        yield np.full((2, length, 3), number, np.float32), np.zeros((2, 1), np.float32)


LENGTHS = {"equal": [4, 4, 4, 4], "varying": [4, 5, 6, 7]}


@pytest.mark.parametrize("case", some_of(LENGTHS, "varying"))
def test_the_first_batch_of_a_generator_is_used_although_a_model_is_built_from_it(case):
    lengths = LENGTHS[case]
    assert len(ctl.predict(Pooling(), (x for x, _ in batches_of_two(lengths)))) == 8
    model = Pooling()
    model.compile("sgd", "mse")
    evaluated = ctl.evaluate(model, batches_of_two(lengths), verbose=0)
    expected = Pooling()
    expected.compile("sgd", "mse")
    expected(np.zeros((2, 4, 3), np.float32))
    expected.set_weights(model.get_weights())
    means = [float(expected.evaluate(x, y, verbose=0)) for x, y in batches_of_two(lengths)]
    assert evaluated["loss"] == pytest.approx(np.mean(means), rel=1e-5)
    history = ctl.fit(model, batches_of_two(lengths), steps_per_epoch=4, epochs=1, verbose=0)
    assert len(history.history["loss"]) == 1


@pytest.mark.parametrize(
    ("weights", "is_valid"),
    [({0: 1.0, 1: 5.0}, True), ({"0": 1.0, "1": 5.0}, True), ({"cat": 1.0}, False), ({0.5: 1.0}, False)],
)
def test_class_weights_have_an_effect_or_are_refused(weights, is_valid):
    if not is_valid:
        with pytest.raises(ctl.UsageError, match="class_weight is"):
            class_weights(weights)
        return
    assert class_weights(weights)(tf.constant([0, 1, 2])).numpy().tolist() == [1.0, 5.0, 1.0]


class Events(keras.callbacks.Callback):
    """Records the calls of epochs and evaluations."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"begin {epoch}")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"end {epoch}: {', '.join(sorted(logs))}")

    def on_test_begin(self, logs=None):
        self.calls.append("test")

    def on_test_end(self, logs=None):
        self.calls.append("tested")


EARLY_ENDS = [(length, has_callbacks) for length in (3, 10, 7) for has_callbacks in (True, False)]


@pytest.mark.parametrize("case", some_of(EARLY_ENDS, (3, False), (10, True)), ids=str)
def test_a_generator_that_ends_early_ends_its_epoch_with_a_warning(case, caplog):
    length, has_callbacks = case
    epochs = [0, 1] if length == 10 else [0]
    x, y, _ = numbers()
    events = Events()
    history = ctl.fit(
        classifier(), ((x[:BATCH], y[:BATCH]) for _ in range(length)), steps_per_epoch=7, epochs=2,
        verbose=0, validation_data=(x, y), callbacks=[events] * has_callbacks,
    )  # fmt: skip
    assert history.epoch == epochs
    assert {"loss", "val_loss"} <= history.history.keys()
    assert {len(values) for values in history.history.values()} == {len(epochs)}
    assert f"x ended after {length} batches; expected 14" in caplog.text
    if has_callbacks:
        assert len(events.calls) == 4 * (length // 7 + 1)
        assert [call.split()[0] for call in events.calls[:4]] == ["begin", "test", "tested", "end"]
        assert all("loss" in call and "val_loss" in call for call in events.calls[3::4])


def test_a_generator_of_all_batches_causes_no_warning(caplog):
    x, y, _ = numbers()
    batches = ((x[:BATCH], y[:BATCH]) for _ in range(4))
    assert ctl.fit(classifier(), batches, steps_per_epoch=2, epochs=2, verbose=0).epoch == [0, 1]
    assert "x ended" not in caplog.text
