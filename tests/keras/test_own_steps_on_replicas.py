"""Own steps on two replicas: clipped gradients and metrics that replicas cannot merge are refused."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from keras import ops
from published import BATCH, Variable, arrays


class LargestOf(Variable):
    def update_state(self, values):
        self.kept.assign(ops.maximum(self.kept, ops.max(values)))


def fitted(make, fit, strategy=None):
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
    return fit(model, *arrays(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


class Own(keras.Model):
    """A step that clips its gradients with `clip` and adds its error to `metric`."""

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


CLIPPED = {
    "by the norm of all": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
    "by the norm of each": lambda gradients: [tf.clip_by_norm(g, 0.1) for g in gradients],
    "by value": lambda gradients: [ops.clip(g, -0.1, 0.1) for g in gradients],
    "halved": lambda gradients: [0.5 * g for g in tf.clip_by_global_norm(gradients, 0.1)[0]],
    "by hand": lambda gradients: [g * tf.minimum(1.0, 0.1 / tf.norm(g)) for g in gradients],
}  # fmt: skip


def fitted_own(strategy, clip, metric):
    with strategy.scope():
        model = Own(clip, metric())
        model.compile(keras.optimizers.SGD(0.1))
    return ctl.fit(model, *arrays(), batch_size=BATCH, own_step="mean", verbose=0)


@pytest.mark.parametrize("case", some_of(CLIPPED, *[*CLIPPED][:2]))
def test_a_step_that_clips_the_gradients_of_each_replica_is_refused(case, two_replicas):
    with pytest.raises(ctl.UsageError, match=r"clips gradients before.*SGD\(global_clipnorm=\.\.\.\)"):
        fitted_own(two_replicas, CLIPPED[case], keras.metrics.Mean)
    assert len(fitted_own(tf.distribute.get_strategy(), CLIPPED[case], keras.metrics.Mean).epoch) == 1


def test_a_weight_that_is_clipped_in_the_step_is_not_refused(two_replicas):
    class Bounded(Own):
        def train_step(self, data):
            x, y = data
            kernel = self.layer.trainable_weights[0]
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean(tf.square(x @ ops.clip(kernel, -1.0, 1.0) - y[:, :1]), axis=-1)
                loss = tf.reduce_mean(errors)
            gradients = [0.5 * g for g in tape.gradient(loss, [kernel])]
            self.optimizer.apply_gradients(zip(gradients, [kernel], strict=True))
            self.metric.update_state(errors)
            return {"error": self.metric.result()}

    def make():
        model = Bounded(list, keras.metrics.Mean(name="error"))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    def fit(model, *data, **options):
        return ctl.fit(model, *data, own_step="mean", **options)

    expected, actual = fitted(make, keras.Model.fit), fitted(make, fit, two_replicas)
    assert actual["error"] == pytest.approx(expected["error"], rel=1e-4)


def test_an_optimizer_applies_gradients_without_a_list_of_variables(two_replicas):
    class Bare(Own):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean(tf.square(self.layer(x) - y[:, :1]), axis=-1)
                loss = tf.reduce_mean(errors)
            self.optimizer.apply(tape.gradient(loss, self.layer.trainable_weights))
            self.metric.update_state(errors)
            return {"error": self.metric.result()}

    def make():
        model = Bare(list, keras.metrics.Mean(name="error"))
        model.compile(keras.optimizers.SGD(0.1))
        model.optimizer.build(model.layer.trainable_weights)
        return model

    def fit(model, *data, **options):
        return ctl.fit(model, *data, own_step="mean", **options)

    expected, actual = fitted(make, keras.Model.fit), fitted(make, fit, two_replicas)
    assert actual["error"] == pytest.approx(expected["error"], rel=1e-4)


def test_a_mean_over_the_last_axis_in_an_own_step_is_not_refused(two_replicas):
    class MeanEntropy(Variable):
        def update_state(self, errors):
            self.kept.assign_add(ops.sum(ops.log_softmax(errors, axis=-1)[:, 0]))

    class Wide(Own):
        def train_step(self, data):
            logs = super().train_step(data)
            self.other.update_state(data[0])
            return logs

    with two_replicas.scope():
        model = Wide(list, keras.metrics.Mean(name="error"))
        model.other = MeanEntropy()
        model.compile(keras.optimizers.SGD(0.1))
    assert ctl.fit(model, *arrays(), batch_size=BATCH, own_step="mean", verbose=0).history["error"]


def test_a_maximum_in_an_own_step_is_refused(two_replicas):
    with pytest.raises(ctl.UsageError, match="the metric 'kept' would have other values on 2 replicas"):
        fitted_own(two_replicas, list, LargestOf)
    history = fitted_own(tf.distribute.get_strategy(), list, LargestOf).history
    assert np.isfinite(history["kept"]).all()
