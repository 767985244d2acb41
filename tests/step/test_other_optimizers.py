"""Optimizers of tf_keras's older API and of the user's own, and masks with weights in losses of Keras."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import some_of
from small_models import Small, weights
from test_gradients import NO_SAVE, with_optimizer


class Descent(tf.Module):
    """An optimizer of the user's own, with the method of Keras without its options."""

    def apply_gradients(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            variable.assign_sub(0.1 * gradient)


@pytest.mark.parametrize(
    ("framework", "make_optimizer"),
    [("tf_keras", lambda: tf_keras.optimizers.legacy.SGD(0.1)), ("tf_keras", Descent), ("module", Descent)],
)
def test_other_optimizers_make_the_same_steps_on_two_replicas(framework, make_optimizer, two_replicas):
    expected = Small(framework=framework, strategy="default", **NO_SAVE)
    expected.train(3)
    trainer = with_optimizer(make_optimizer)(framework=framework, strategy=two_replicas, **NO_SAVE)
    trainer.train(3)
    for actual, value in zip(weights(trainer), weights(expected), strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-6)


def test_slots_of_a_legacy_optimizer_are_restored(tmp_path):
    def trainer(directory):
        changed = with_optimizer(lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9))
        model_dir = str(tmp_path / directory)
        return changed(framework="tf_keras", strategy="default", model_dir=model_dir, writers=[])

    unbroken, parts = trainer("a"), [trainer("b"), trainer("b")]
    unbroken.train(4)
    parts[0].train(2)
    parts[1].train(4)
    for actual, value in zip(weights(parts[1]), weights(unbroken), strict=True):
        np.testing.assert_array_equal(actual, value)


def test_overwriting_by_the_average_of_tf_keras_is_refused_on_replicas(two_replicas):
    changed = with_optimizer(lambda: tf_keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3))
    with pytest.raises(ctl.UsageError, match=r"ema_overwrite_frequency=3.*finalize_variable_values"):
        changed(framework="tf_keras", strategy=two_replicas, **NO_SAVE).train(1)
    changed(framework="tf_keras", strategy="default", **NO_SAVE).train(1)


def sequence_model(reduction):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Embedding(7, 4, mask_zero=True), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.02), keras.losses.MeanSquaredError(reduction=reduction))
    return model


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("has_weights", some_of([True, False], True))
def test_masks_and_weights_have_the_means_of_keras_on_two_replicas(reduction, has_weights, two_replicas):
    generator = np.random.default_rng(1)
    x = generator.integers(0, 7, (24, 5))  # 0 is masked
    y = generator.normal(size=(24, 5, 2)).astype(np.float32)
    sample_weight = generator.uniform(0.1, 2.0, (24, 5)).astype(np.float32) if has_weights else None
    results = []
    for fit, scope in ((keras.Model.fit, None), (ctl.fit, two_replicas)):
        with (scope or tf.distribute.get_strategy()).scope():
            model = sequence_model(reduction)
        options = {"sample_weight": sample_weight, "batch_size": 8, "epochs": 2, "shuffle": False}
        history = fit(model, x, y, verbose=0, **options)
        results.append((history.history["loss"], model.get_weights()))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-4)
    for actual, value in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-5)
