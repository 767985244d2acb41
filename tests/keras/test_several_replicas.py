"""Losses and metrics that replicas would compute differently are refused before the first step."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from published import BATCH, arrays


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


class Variable(keras.metrics.Metric):
    """A metric with one variable."""

    def __init__(self):
        super().__init__(name="kept")
        self.kept = self.add_variable((), "zeros", name="kept")

    def result(self):
        return self.kept


class Largest(Variable):
    def update_state(self, targets, outputs, sample_weight=None):
        self.kept.assign(ops.maximum(self.kept, ops.max(ops.abs(targets - outputs))))


class Total(Variable):
    def update_state(self, targets, outputs, sample_weight=None):
        self.kept.assign(self.kept + ops.sum(ops.abs(targets - outputs)))


class LargestOf(Variable):
    def update_state(self, values):
        self.kept.assign(ops.maximum(self.kept, ops.max(values)))


class Adds(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss, **how):
        super().__init__(**how)
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
    """A model whose `call` has no argument `training`, and adds a sum to the loss."""

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
    "a sum that a model adds": (subclassed, "the loss that .* 'subclassed.*'.*"),
}  # fmt: skip
SAME = {
    "scalar": lambda: regression(mean, [mean]),
    "by example": lambda: regression(OwnSquares(), [by_example]),
    "a sum of losses by example": lambda: regression(OwnSquares(reduction="sum")),
    "a metric of sums": lambda: regression(metrics=[Total]),
    "an added mean": lambda: regression(between=Adds(lambda x: ops.mean(ops.square(x)))),
    "an activity": lambda: regression(between=keras.layers.Dense(3, activity_regularizer="l2")),
}  # fmt: skip


def fitted(make, fit, strategy=None, data=None):
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
    return fit(model, *(data or arrays()), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize("case", REFUSED)
def test_a_number_that_would_differ_is_refused_on_two_replicas_only(case, two_replicas):
    make, words = REFUSED[case]
    with pytest.raises(ctl.UsageError, match=f"^{words} would have other values on 2 replicas"):
        fitted(make, ctl.fit, two_replicas)
    expected, found = fitted(make, keras.Model.fit), fitted(make, ctl.fit)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name


def test_the_loss_of_one_of_two_outputs_is_found(two_replicas):
    x, y = arrays()
    data = x, {"left": y[:, :1], "right": y[:, :1]}
    with pytest.raises(ctl.UsageError, match="^the loss root would have other values"):
        fitted(two_losses, ctl.fit, two_replicas, data)


@pytest.mark.parametrize("case", SAME)
def test_a_number_that_is_a_mean_or_a_sum_over_examples_is_that_of_one_device(case, two_replicas, caplog):
    expected, found = fitted(SAME[case], keras.Model.fit), fitted(SAME[case], ctl.fit, two_replicas)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name
    assert "add are taken as means" not in caplog.text


def test_added_losses_with_random_numbers_are_named_in_a_warning(two_replicas, caplog):
    fitted(lambda: regression(between=Adds(random_numbers, name="noisy")), ctl.fit, two_replicas)
    assert caplog.text.count("Losses that the layers 'noisy' add are taken as means") == 1


class Own(keras.Model):
    """A step that clips its gradients with `clip` and keeps its error in `metric`."""

    def __init__(self, clip, metric):
        super().__init__()
        self.layer = keras.Sequential([keras.Input(arrays()[0].shape[1:]), keras.layers.Dense(1)])
        self.clip, self.metric = clip, metric

    @property
    def metrics(self):
        return [self.metric]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(self.layer(x) - y[:, :1]), axis=-1)
            loss = tf.reduce_mean(errors)
        weights = self.layer.trainable_weights
        self.optimizer.apply_gradients(zip(self.clip(tape.gradient(loss, weights)), weights, strict=True))
        self.metric.update_state(errors)
        return {m.name: m.result() for m in self.metrics}


class OnBatch(keras.callbacks.Callback):
    """Predicts and tests three rows at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        x, y = (array[:3] for array in arrays())
        logs["sum"] = float(np.sum(self.model.predict_on_batch(x)))
        logs["error"] = float(np.ravel(self.model.test_on_batch(x, y))[0])


def test_callbacks_call_the_model_with_one_batch_as_on_one_device(two_replicas):
    def fit(kind):
        return lambda model, *data, **how: kind(model, *data, callbacks=[OnBatch()], **how)

    expected = fitted(regression, fit(keras.Model.fit))
    for strategy in (None, two_replicas):
        found = fitted(regression, fit(ctl.fit), strategy)
        assert {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()} == found


CLIPPED = {
    "by the norm of all": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
    "by the norm of each": lambda gradients: [tf.clip_by_norm(g, 0.1) for g in gradients],
    "by value": lambda gradients: [ops.clip(g, -0.1, 0.1) for g in gradients],
}  # fmt: skip


def fitted_own(strategy, clip, metric):
    with strategy.scope():
        model = Own(clip, metric())
        model.compile(keras.optimizers.SGD(0.1))
    return ctl.fit(model, *arrays(), batch_size=BATCH, own_step="mean", verbose=0)


@pytest.mark.parametrize("case", CLIPPED)
def test_a_step_that_clips_the_gradients_of_each_replica_is_refused(case, two_replicas):
    with pytest.raises(ctl.UsageError, match=r"clips gradients before.*SGD\(global_clipnorm=\.\.\.\)"):
        fitted_own(two_replicas, CLIPPED[case], keras.metrics.Mean)
    assert len(fitted_own(tf.distribute.get_strategy(), CLIPPED[case], keras.metrics.Mean).epoch) == 1


def test_a_maximum_in_an_own_step_is_refused(two_replicas):
    with pytest.raises(ctl.UsageError, match="the metric 'kept' would have other values on 2 replicas"):
        fitted_own(two_replicas, list, LargestOf)
    history = fitted_own(tf.distribute.get_strategy(), list, LargestOf).history
    assert np.isfinite(history["kept"]).all()
