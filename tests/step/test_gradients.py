"""The gradient path: sum, check, clip and apply; results equal on one device and on two replicas."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.step.optimizers import check_optimizer, scale_learning_rate
from small_models import BATCH, PlainModel, Small, every_step, losses, weights

STEPS = 4
NO_SAVE = dict(writers=[], intervals=every_step(log=ctl.Every()))


@pytest.fixture(scope="module")
def two_replicas():
    """Returns a strategy with separate collective keys: two strategies of one process would share keys."""

    class SeparateKeys(tf.distribute.MirroredStrategy):
        _collective_key_base = 1000

    return SeparateKeys(["/cpu:0", "/cpu:1"])


def trained(trainer, steps=STEPS):
    """Returns the final weights and the logged losses."""
    writer = ctl.MemoryWriter()
    trainer._writers, trainer.intervals = [writer], every_step()
    trainer.train(steps)
    return weights(trainer), losses(writer)


def assert_equal(expected, results, atol=1e-6):
    for a, b in zip(expected[0], results[0], strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0)
    np.testing.assert_allclose(expected[1], results[1], atol=atol, rtol=0)


def with_gradients(base=Small, **options):
    class Changed(base):
        def build(self):
            super().build()
            self.gradients = ctl.Gradients(**options)

    return Changed


class Regularised(Small):
    """A model with a large regularization loss, which counts once per step."""

    def build(self):
        super().build()
        weights = self.model.get_weights()
        self.model = keras.Sequential([
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(4),
        ])  # fmt: skip
        self.model.set_weights(weights)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"], regularization=self.model.losses)
        self.minimize(loss, tape)
        return scores


def with_optimizer(make_optimizer):
    class Changed(Small):
        def build(self):
            super().build()
            self.optimizer = make_optimizer()

    return Changed


@pytest.fixture(scope="module")
def unclipped():
    return trained(Small(strategy="default"))


@pytest.fixture(scope="module")
def regularised():
    return trained(Regularised(strategy="default"))


@pytest.fixture(scope="module")
def clipped():
    return trained(with_gradients(clip_norm=0.05)(strategy="default"))


def test_two_replicas_equal_one_device(unclipped, two_replicas):
    assert_equal(unclipped, trained(Small(strategy=two_replicas)))


def test_clipping_comes_after_the_sum_over_replicas(unclipped, clipped, two_replicas):
    difference = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(unclipped[0], clipped[0], strict=True)))
    assert difference > 1e-2, "no gradient was clipped, so the test checks nothing"
    assert_equal(clipped, trained(with_gradients(clip_norm=0.05)(strategy=two_replicas)))


def test_a_clipped_update_has_the_norm_of_the_setting():
    trainer = with_gradients(clip_norm=0.05)(strategy="default", **NO_SAVE)
    trainer.prepare()
    weights_before = weights(trainer)
    means = trainer.train(1)
    difference = [(a - b) / 0.1 for a, b in zip(weights_before, weights(trainer), strict=True)]
    assert np.sqrt(sum(np.sum(m**2) for m in difference)) == pytest.approx(0.05, rel=1e-3)
    assert means["gradient_norm"] > 0.05, "the norm before clipping is reported"


@pytest.mark.parametrize("parts", some_of([3, 5], 5))  # 24 rows in 5 parts are not equal
def test_accumulation_does_not_change_the_numbers(regularised, parts):
    changed = with_gradients(Regularised, accumulate_steps=parts)
    assert_equal(regularised, trained(changed(strategy="default")), atol=2e-6)


def test_accumulation_on_two_replicas_equals_one_device(regularised, two_replicas):
    changed = with_gradients(Regularised, accumulate_steps=5)
    assert_equal(regularised, trained(changed(strategy=two_replicas)), atol=2e-6)


def test_regularization_counts_once_on_two_replicas(unclipped, regularised, two_replicas):
    assert np.abs(unclipped[0][0] - regularised[0][0]).max() > 1e-2, "without effect"
    assert_equal(regularised, trained(Regularised(strategy=two_replicas)))


@pytest.mark.parametrize("dtype", some_of(["bfloat16", "float16"], "bfloat16"))
def test_half_the_bytes_on_the_wire_give_nearly_the_same_numbers(unclipped, two_replicas, dtype):
    rounded = trained(with_gradients(wire_dtype=dtype)(strategy=two_replicas))
    assert_equal(unclipped, rounded, atol=5e-3)
    assert any((a != b).any() for a, b in zip(unclipped[0], rounded[0], strict=True)), "not cast"


def poisoned(bad_step, where):
    """Returns a trainer class with a NaN in the data of one step, in a row of one replica."""

    class Poisoned(Small):
        def train_data(self, batch_size):
            x, y = np.ones([BATCH * 8, 8], np.float32), np.zeros(BATCH * 8, np.int64)
            x[(bad_step - 1) * BATCH + where] = np.nan
            return ctl.from_arrays((x, y), batch_size, shuffle=False)

    return Poisoned


@pytest.mark.parametrize("where", some_of([0, BATCH - 1], BATCH - 1))  # on the first or the last replica
@pytest.mark.parametrize("steps_per_loop", some_of([1, 8], 8))
def test_a_nan_in_one_replica_names_the_step_and_leaves_the_weights(two_replicas, where, steps_per_loop):
    intervals = every_step(log=ctl.Every(), steps_per_loop=steps_per_loop)
    reference = Small(strategy="default", writers=[])
    reference.train_data = poisoned(7, 0)(strategy="default").train_data
    reference.train(3)
    trainer = poisoned(4, where)(strategy=two_replicas, intervals=intervals, writers=[])
    with pytest.raises(ctl.NonFiniteError, match=r"^Step 4: .*not applied.*clip_norm"):
        trainer.train(8)
    for a, b in zip(weights(reference), weights(trainer), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


class TwoPlayers(ctl.Trainer):
    """Two models, two optimizers, one step: the shape of a GAN."""

    def build(self):
        self.model, self.second = PlainModel(), PlainModel()
        self.optimizer, self.other = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        self.other.build(self.second.trainable_variables)

    def train_data(self, batch_size):
        return Small.train_data(Small(strategy="default"), batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as first, tf.GradientTape() as second:
            logits = self.model(x)
            cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            error = tf.reduce_sum((self.second(x) - tf.stop_gradient(logits)) ** 2, axis=1)
            loss, second_loss = self.average(cross_entropy), self.average(error)
        self.minimize(loss, first)
        self.minimize(second_loss, second, self.second.trainable_variables, self.other)
        return {"loss": cross_entropy, "other": error}


def test_two_optimizers_in_one_step_equal_one_device(two_replicas):
    results, names = [], []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        trainer = TwoPlayers(strategy=strategy, global_batch_size=BATCH)
        result = trained(trainer)
        result[0].extend(v.numpy() for v in trainer.second.trainable_variables)
        results.append(result)
        names.append(set(trainer.train(STEPS + 1)))
    assert_equal(*results)
    assert {"gradient_norm", "gradient_norm/other"} <= names[0] & names[1]


def test_accumulation_of_keras_3_that_fails_on_two_replicas_is_refused(two_replicas):
    changed = with_optimizer(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(ctl.UsageError, match="accumulate_steps"):
        changed(strategy=two_replicas, **NO_SAVE).train(1)


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_overwriting_by_the_moving_average_is_that_of_keras_on_any_replicas(replicas, two_replicas):
    def make_optimizer():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)

    class ByKeras(with_optimizer(make_optimizer)):
        def minimize(self, loss, tape):
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply(gradients, self.model.trainable_variables)

    expected = trained(ByKeras(strategy="default", **NO_SAVE), 8)
    without_ema = trained(Small(strategy="default", **NO_SAVE), 8)
    assert np.abs(expected[0][0] - without_ema[0][0]).max() > 1e-3, "no weight was overwritten"
    strategy = two_replicas if replicas == 2 else "default"
    trainer = with_optimizer(make_optimizer)(strategy=strategy, **NO_SAVE)
    assert_equal(expected, trained(trainer, 8))
    assert trainer.optimizer.ema_overwrite_frequency == 3


def test_the_keras_3_optimizer_is_not_changed(two_replicas):
    trainer = Small(strategy=two_replicas, **NO_SAVE)
    trainer.train(1)
    assert "_all_reduce_sum_gradients" not in vars(trainer.optimizer)


@pytest.mark.parametrize(
    ("optimizer", "error_pattern"),
    [
        (lambda: "adam", r"keras.optimizers.get\('adam'\)"),
        (object, "expected a Keras optimizer or an object with"),
    ],
)
def test_an_object_that_is_no_optimizer_is_refused_before_any_step(optimizer, error_pattern):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        check_optimizer(optimizer())
    with pytest.raises(ctl.UsageError, match=r"self\.optimizer"):
        with_optimizer(optimizer)(strategy="default", **NO_SAVE).train(1)


def test_a_loss_that_depends_on_no_variable_is_refused():
    class Outside(Small):
        def train_step(self, batch):
            loss = self.average(self.score(batch, training=True)["loss"])
            with tf.GradientTape() as tape:
                pass
            self.minimize(loss, tape)

    with pytest.raises(ctl.UsageError, match="no gradient for any of 4 variables"):
        Outside(strategy="default", **NO_SAVE).train(1)


def test_a_loss_per_example_is_refused_with_a_hint():
    class Vector(Small):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                scores = self.score(batch, training=True)
            self.minimize(scores["loss"], tape)

    with pytest.raises(ctl.UsageError, match=r"self\.average\(per_example\)"):
        Vector(strategy="default", **NO_SAVE).train(1)


@pytest.mark.parametrize("options", [
    {"clip_norm": 0}, {"clip_norm": -1.0}, {"clip_norm": float("nan")}, {"accumulate_steps": 0},
    {"accumulate_steps": 1.5}, {"accumulate_steps": True}, {"wire_dtype": "int4"},
])  # fmt: skip
def test_gradients_refuses_invalid_options(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ctl.UsageError, match=rf"{name} is {value!r}; expected"):
        ctl.Gradients(**options)


def test_the_learning_rate_grows_with_the_replicas_as_requested():
    assert scale_learning_rate(0.1, 4) == 0.1
    assert scale_learning_rate(0.1, 4, "linear") == pytest.approx(0.4)
    assert scale_learning_rate(0.1, 4, "sqrt") == pytest.approx(0.2)
    with pytest.raises(ctl.UsageError, match="lr_scaling is .cubic.; expected .none., .linear. or .sqrt."):
        scale_learning_rate(0.1, 4, "cubic")
