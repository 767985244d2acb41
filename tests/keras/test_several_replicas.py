"""Errors for losses and metrics that replicas would compute differently."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from fitting import has_mean_activity_losses
from keras import ops
from published import BATCH, Variable, arrays


def root(targets, outputs):
    return ops.sqrt(ops.mean(ops.square(targets - outputs)))


def summed(targets, outputs):
    return ops.sum(ops.square(targets - outputs))


def mean(targets, outputs):
    return ops.mean(ops.square(targets - outputs))


def by_example(targets, outputs):
    return ops.mean(ops.square(targets - outputs), axis=-1)


class Contrastive(keras.losses.Loss):
    """Compares each example with all of the batch."""

    def call(self, targets, outputs):
        similarity = ops.matmul(outputs, ops.transpose(targets))
        return keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(outputs)[0]), similarity, from_logits=True
        )


class OwnSquares(keras.losses.Loss):
    def call(self, targets, outputs):
        return by_example(targets, outputs)


class Largest(Variable):
    def update_state(self, targets, outputs, sample_weight=None):
        self.kept.assign(ops.maximum(self.kept, ops.max(ops.abs(targets - outputs))))


class Total(Variable):
    def update_state(self, targets, outputs, sample_weight=None):
        self.kept.assign(self.kept + ops.sum(ops.abs(targets - outputs)))


class FromOne(keras.metrics.Metric):
    """Metric with the initial value one."""

    def __init__(self):
        super().__init__(name="from_one")
        self.kept = self.add_variable((), "ones", name="kept")

    def result(self):
        return self.kept

    def reset_state(self):
        self.kept.assign(1.0)

    def update_state(self, targets, outputs, sample_weight=None):
        self.kept.assign_add(ops.sum(ops.abs(targets - outputs)))


class MeanOfBatches(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="batches")
        self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

    def update_state(self, targets, outputs, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(targets - outputs)))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class RootOfKeras(keras.losses.MeanSquaredError):
    """A subclass of a Keras loss that inherits its function."""

    def call(self, targets, outputs):
        return root(targets, outputs)


class LargestOfKeras(keras.metrics.MeanSquaredError):
    def update_state(self, targets, outputs, sample_weight=None):
        self.total.assign(ops.maximum(self.total, ops.max(ops.abs(targets - outputs))))
        self.count.assign(1.0)


def masked(sentinel):
    def masked_loss(targets, outputs):
        mask = ops.cast(ops.not_equal(targets, sentinel), outputs.dtype)
        return ops.sum(mask * ops.square(targets - outputs)) / (ops.sum(mask) + 1e-6)

    return masked_loss


def ignoring(label):
    """A masked loss of whole-numbered labels."""

    def loss(labels, outputs):
        labels = ops.cast(ops.reshape(labels, [-1]), "int32")
        mask = ops.cast(labels != label, outputs.dtype)
        chosen = ops.where(labels == label, 0, labels)
        losses = keras.losses.sparse_categorical_crossentropy(chosen, outputs, from_logits=True)
        return ops.sum(losses * mask) / (ops.sum(mask) + 1e-6)

    return loss


def by_keras(targets, outputs):
    return keras.losses.MeanSquaredError()(targets, outputs)


def entropy(targets, outputs):
    chances = ops.softmax(outputs)
    return -ops.sum(chances * ops.log(chances), axis=-1)


class AddsInTraining(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(0.1 * ops.sum(ops.square(x)))
        return x


class Adds(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


def regression(loss="mse", metrics=(), between=None):
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(arrays()[1].shape[1])]
    model = keras.Sequential([keras.Input(arrays()[0].shape[1:]), *([between] if between else []), *layers])
    model.compile("sgd", loss, metrics=[m() if isinstance(m, type) else m for m in metrics])
    return model


def two_losses():
    x = keras.Input(arrays()[0].shape[1:])
    model = keras.Model(x, {name: keras.layers.Dense(1, name=name)(x) for name in ("left", "right")})
    model.compile("sgd", {"left": "mse", "right": root})
    return model


class Subclassed(keras.Model):
    """A model that adds a sum to the loss in a `call` without an argument `training`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(arrays()[1].shape[1])

    def call(self, x):
        hidden = self.dense(x)
        self.add_loss(ops.sum(ops.square(hidden)))
        return hidden


def subclassed():
    model = Subclassed()
    model.compile("sgd", "mse")
    return model


def random_numbers(x):
    return ops.mean(ops.square(x) * tf.random.uniform(tf.shape(x)))


REFUSED = {
    "a root of a mean": (lambda: regression(root), "the loss root"),
    "a sum": (lambda: regression(summed), "the loss summed"),
    "between examples": (lambda: regression(Contrastive()), "the loss Contrastive"),
    "a metric of the batch": (lambda: regression(metrics=[root]), "the metric 'root'"),
    "a maximum": (lambda: regression(metrics=[Largest]), "the metric 'kept'"),
    "an added sum": (lambda: regression(between=Adds(ops.sum, name="add")), "the loss that .* 'add'.*"),
    "a masked mean": (lambda: regression(masked(0.0)), "the loss masked_loss"),
    "another mask": (lambda: regression(masked(-1.0)), "the loss masked_loss"),
    "a loss derived from one of Keras": (lambda: regression(RootOfKeras()), "the loss mean_squared_error"),
    "a metric derived from one of Keras": (lambda: regression(metrics=[LargestOfKeras]), "the metric '.*'"),
    "a sum in training": (lambda: regression(between=AddsInTraining(name="add")), "the loss .*'add'.*"),
    "a sum that a model adds": (subclassed, "the loss that .* 'subclassed.*'.*"),
}  # fmt: skip
ACCEPTED = {
    "scalar": lambda: regression(mean, [mean]),
    "by example": lambda: regression(OwnSquares(), [by_example]),
    "a sum of losses by example": lambda: regression(OwnSquares(reduction="sum")),
    "a metric of sums": lambda: regression(metrics=[Total]),
    "a metric that begins at one": lambda: regression(metrics=[FromOne]),
    "a mean over the last axis": lambda: regression(metrics=[entropy]),
    "a loss of Keras inside": lambda: regression(by_keras, [by_keras]),
    "an added mean": lambda: regression(between=Adds(lambda x: ops.mean(ops.square(x)))),
    "an activity": lambda: regression(between=keras.layers.Dense(3, activity_regularizer="l2")),
}  # fmt: skip
if not has_mean_activity_losses():
    REFUSED["an activity"] = ACCEPTED.pop("an activity"), "the loss that .* 'dense.*'.*"


def fit_history(make, fit, strategy=None, data=None):
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
    return fit(model, *(data or arrays()), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize(
    "case", some_of(REFUSED, "a root of a mean", "an added sum")
)
def test_a_number_that_would_differ_is_refused_on_two_replicas_only(case, two_replicas):
    make, message = REFUSED[case]
    with pytest.raises(ctl.UsageError, match=f"^{message} would have other values on 2 replicas"):
        fit_history(make, ctl.fit, two_replicas)
    expected, actual = fit_history(make, keras.Model.fit), fit_history(make, ctl.fit)
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-4), name


@pytest.mark.parametrize("label", [0, 255, -1])
def test_masked_labels_are_detected_for_every_value(label, two_replicas):
    data = arrays()[0], np.arange(len(arrays()[0]), dtype=np.int32) % 3

    def make():
        model = keras.Sequential([keras.Input(data[0].shape[1:]), keras.layers.Dense(3)])
        model.compile("sgd", ignoring(label))
        return model

    with pytest.raises(ctl.UsageError, match="^the loss loss would have other values"):
        fit_history(make, ctl.fit, two_replicas, data)


def test_outputs_are_compared_with_their_own_targets_only(two_replicas):
    x, y = arrays()

    def make():
        inputs = keras.Input(x.shape[1:])
        outputs = {"wide": keras.layers.Dense(3)(inputs), "flat": keras.layers.Dense(1)(inputs)}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"wide": OwnSquares(), "flat": "mse"}, metrics={"wide": [by_example]})
        return model

    data = x, {"wide": np.repeat(y[:, :1], 3, axis=1), "flat": y[:, 0]}
    expected, actual = (
        fit_history(make, keras.Model.fit, data=data),
        fit_history(make, ctl.fit, two_replicas, data),
    )
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-4), name


def test_a_metric_that_counts_batches_is_named_in_a_warning(two_replicas, caplog):
    fit_history(lambda: regression(metrics=[MeanOfBatches]), ctl.fit, two_replicas)
    assert "The metric 'batches' counts batches, not examples" in caplog.text


class Counting(keras.layers.Layer):
    """Counts its calls in a `tf.Variable` that Keras does not track."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def test_the_check_changes_no_variables(two_replicas):
    with two_replicas.scope():
        layer = Counting()
        model = regression(by_example, [Total], between=layer)
    ctl.fit(model, *arrays(), batch_size=BATCH, verbose=0)
    steps = -(-len(arrays()[0]) // BATCH)
    assert int(layer.calls.numpy()) == steps


@pytest.mark.slow
def test_inputs_without_a_shape_and_models_without_targets_are_not_checked(two_replicas):
    def without_targets():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(3), Adds(lambda x: ops.mean(x * x))]
        )
        model.compile("sgd")
        return model

    data = (arrays()[0][:, :3],)
    assert fit_history(without_targets, ctl.fit, two_replicas, data)["loss"]
    rows = tf.RaggedTensor.from_row_lengths(np.arange(32) % 5, [2] * 16)
    ragged = tf.data.Dataset.from_tensor_slices((rows, np.zeros([16, 1], np.float32))).batch(8)

    def embedded():
        x = keras.Input((None,), dtype="int64", ragged=True)
        outputs = keras.layers.Dense(1)(
            keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5, 4)(x))
        )
        model = keras.Model(x, outputs)
        model.compile("sgd", by_example)
        return model

    with two_replicas.scope():
        model = embedded()
    assert ctl.fit(model, ragged, verbose=0).history["loss"]


def test_the_loss_of_one_of_two_outputs_is_detected(two_replicas):
    x, y = arrays()
    data = x, {"left": y[:, :1], "right": y[:, :1]}
    with pytest.raises(ctl.UsageError, match="^the loss root would have other values"):
        fit_history(two_losses, ctl.fit, two_replicas, data)


@pytest.mark.parametrize(
    "case", some_of(ACCEPTED, "by example", "a metric of sums")
)
def test_a_number_that_is_a_mean_or_a_sum_over_examples_is_that_of_one_device(case, two_replicas, caplog):
    expected, actual = (
        fit_history(ACCEPTED[case], keras.Model.fit),
        fit_history(ACCEPTED[case], ctl.fit, two_replicas),
    )
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-4), name
    assert "add are taken as means" not in caplog.text
    assert "counts batches" not in caplog.text


def test_added_losses_with_random_numbers_are_named_in_a_warning(two_replicas, caplog):
    fit_history(lambda: regression(between=Adds(random_numbers, name="noisy")), ctl.fit, two_replicas)
    assert caplog.text.count("Losses that the layers 'noisy' add are taken as means") == 1


class OnBatch(keras.callbacks.Callback):
    """Predicts and tests three rows at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        x, y = (array[:3] for array in arrays())
        logs["sum"] = float(np.sum(self.model.predict_on_batch(x)))
        self.model.reset_metrics()  # newer versions of Keras do
        logs["error"] = float(np.ravel(self.model.test_on_batch(x, y))[0])


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_callbacks_call_the_model_with_one_batch_as_on_one_device(replicas, two_replicas):
    def fit(fit_method):
        return lambda model, *data, **options: fit_method(model, *data, callbacks=[OnBatch()], **options)

    expected = fit_history(regression, fit(keras.Model.fit))
    actual = fit_history(regression, fit(ctl.fit), two_replicas if replicas == 2 else None)
    assert {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()} == actual
