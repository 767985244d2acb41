"""Moving averages of weights: evaluation, export and prediction use them, training does not."""

import json

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from correctness import BATCH, Averaged, AveragedByHand, AveragedTfKeras, Linear
from ctl import app
from small_models import every_step, weights

KINDS = {"keras3": Averaged, "tf_keras": AveragedTfKeras, "own": AveragedByHand}
STEPS = 6


ON_ONE_DEVICE, ON_TWO = (
    pytest.mark.parametrize("strategy", some_of(["default", "two"], name), indirect=True)
    for name in ("default", "two")
)  # the other one is slow


@pytest.fixture
def strategy(request, two_replicas):
    return two_replicas if request.param == "two" else "default"


def make_trainer(variant, strategy, **settings):
    return KINDS[variant](
        strategy=strategy, global_batch_size=BATCH, writers=[], intervals=every_step(), **settings
    )


def numpy_training(variant, steps=STEPS):
    """Returns (weights, averages, loss with the averages) of a training loop in NumPy."""
    x, y = Linear.arrays(None)
    w, b = np.full([3], 0.3), 0.0
    slow = None if variant == "keras3" else np.array([*w, b])
    if variant == "keras3":
        slow = np.zeros(4)
    for step in range(steps):
        rows = slice(step * BATCH % 48, step * BATCH % 48 + BATCH)
        error = x[rows] @ w + b - y[rows]
        w, b = w - 0.05 * 2 * error @ x[rows] / BATCH, b - 0.05 * 2 * error.mean()
        momentum = 0.0 if variant == "keras3" and step == 0 else 0.8  # Keras 3 starts at the first weights
        slow = momentum * slow + (1 - momentum) * np.array([*w, b])
    loss = np.mean((x[:13] @ slow[:3] + slow[3] - y[:13]) ** 2)
    return np.array([*w, b]), slow, loss


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


@ON_TWO
@pytest.mark.parametrize("variant", some_of(KINDS, "keras3"))
def test_a_model_is_evaluated_exported_and_predicts_with_its_averages(variant, strategy, tmp_path):
    raw, slow, loss = numpy_training(variant)
    assert np.abs(raw - slow).max() > 0.05
    trainer = make_trainer(variant, strategy)
    trainer.train(STEPS)
    assert trainer.evaluate()["loss"] == pytest.approx(loss, abs=1e-5)
    trainer.export("saved_model", directory=str(tmp_path))
    x = Linear.arrays(None)[0]
    expected = (x @ slow[:3] + slow[3])[:, None]
    np.testing.assert_allclose(trainer.predict(x), expected, atol=1e-5)
    served = tf.saved_model.load(str(tmp_path / "saved_model"))
    call = served.serve if hasattr(served, "serve") else served
    np.testing.assert_allclose(call(x), expected, atol=1e-5)
    np.testing.assert_allclose(flat(weights(trainer)), raw, atol=1e-5)


@ON_ONE_DEVICE
@pytest.mark.parametrize("variant", some_of(KINDS, "keras3"))
def test_evaluations_do_not_change_the_training_and_its_resume(variant, strategy, tmp_path):
    unbroken = make_trainer(variant, strategy)
    unbroken.train(STEPS)
    for steps in (3, STEPS):
        resumed = make_trainer(variant, strategy, model_dir=str(tmp_path))
        resumed.train(steps)
        resumed.evaluate()
    for a, b in zip(weights(unbroken), weights(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert unbroken.evaluate() == resumed.evaluate()


@ON_ONE_DEVICE
def test_the_weights_are_evaluated_if_evaluate_ema_is_false(strategy):
    raw, _, _ = numpy_training("keras3")
    x, y = Linear.arrays(None)
    trainer = make_trainer("keras3", strategy, evaluate_ema=False)
    trainer.train(STEPS)
    expected = np.mean((x[:13] @ raw[:3] + raw[3] - y[:13]) ** 2)
    assert trainer.evaluate()["loss"] == pytest.approx(expected, abs=1e-5)


@ON_ONE_DEVICE
def test_before_the_first_step_there_are_no_averages(strategy):
    x, y = Linear.arrays(None)
    expected = np.mean((x[:13] @ np.full([3], 0.3) - y[:13]) ** 2)
    assert make_trainer("keras3", strategy).evaluate()["loss"] == pytest.approx(expected, abs=1e-5)


def test_the_averages_of_an_optimizer_that_scales_the_loss_are_used():
    class Scaled(Averaged):
        optimizer_of = staticmethod(
            lambda: keras.optimizers.LossScaleOptimizer(Averaged.optimizer_of(), initial_scale=8.0)
        )

    trainer = Scaled(strategy="default", global_batch_size=BATCH, writers=[], intervals=every_step())
    trainer.train(STEPS)
    assert trainer.evaluate()["loss"] == pytest.approx(numpy_training("keras3")[2], abs=1e-5)


def test_an_error_in_an_evaluation_leaves_the_weights_as_they_were():
    class Fails(Averaged):
        def eval_step(self, batch):
            tf.debugging.assert_less(batch[0], -1e9)
            return super().eval_step(batch)

    trainer = Fails(strategy="default", global_batch_size=BATCH, writers=[], intervals=every_step())
    trainer.train(STEPS)
    weights_before = weights(trainer)
    with pytest.raises(tf.errors.InvalidArgumentError):
        trainer.evaluate()
    for a, b in zip(weights_before, weights(trainer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_average_without_its_variable_is_refused_with_a_hint():
    class Wrong(Averaged):
        def moving_averages(self):
            return [self.model.trainable_variables]

    trainer = Wrong(strategy="default", global_batch_size=BATCH, writers=[])
    with pytest.raises(ctl.UsageError, match=r"pairs \(variable, its average\).*self.ema.average"):
        trainer.evaluate()


def compiled(rate=0.05):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.set_weights([np.full([3, 1], 0.3), np.zeros([1])])
    model.compile(keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.8), "mse")
    return model


def test_fit_that_restores_the_best_weights_leaves_them_as_model_fit_does():
    x, y = Linear.arrays(None)
    fit_options = dict(
        batch_size=BATCH, epochs=4, shuffle=False, verbose=0, validation_data=(x, y[:, None])
    )
    # training diverges at this rate: the first epoch is the best
    with_model_fit, with_ctl_fit = compiled(0.6), compiled(0.6)
    with_model_fit.fit(x, y[:, None], callbacks=[keras.callbacks.EarlyStopping(
        "val_loss", patience=2, restore_best_weights=True)], **fit_options)  # fmt: skip
    stopping = ctl.EarlyStopping("loss", patience=2, restore_best=True)
    ctl.fit(with_ctl_fit, x, y[:, None], callbacks=[stopping], **fit_options)
    assert np.abs(with_model_fit.get_weights()[0]).max() < 1e6
    for a, b in zip(with_ctl_fit.get_weights(), with_model_fit.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_fit_validates_with_the_weights_and_ends_with_the_averages_as_model_fit_does():
    x, y = Linear.arrays(None)
    with_model_fit, with_ctl_fit = compiled(), compiled()
    fit_options = dict(
        batch_size=BATCH, epochs=3, shuffle=False, verbose=0, validation_data=(x[:13], y[:13, None])
    )
    expected = with_model_fit.fit(x, y[:, None], **fit_options)
    history = ctl.fit(with_ctl_fit, x, y[:, None], **fit_options)
    np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], atol=1e-5)
    for a, b in zip(with_ctl_fit.get_weights(), with_model_fit.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_callback_exports_and_keeps_the_averages_of_its_step(tmp_path):
    class ExportAtStep3:
        def on_metrics(self, step, values, run):
            decision = ctl.Decision(export=["weights"], directory=str(tmp_path), keep_weights=True)
            return decision if step == 3 else None

    trainer = make_trainer("keras3", "default", callbacks=[ExportAtStep3()])
    trainer.train(STEPS)
    raw, slow, loss = numpy_training("keras3", 3)
    np.testing.assert_allclose(flat(weights(trainer)), raw, atol=1e-5)
    assert trainer.evaluate()["loss"] == pytest.approx(loss, abs=1e-5)
    trainer.model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(flat(weights(trainer)), slow, atol=1e-5)


def test_mode_predict_uses_the_averages(capsys):
    class Predicting(Averaged):
        def predict(self):
            yield {"weights": flat(self.model.get_weights())}

    trainer = Predicting(strategy="default", global_batch_size=BATCH, writers=[], intervals=every_step())
    trainer.train(STEPS)
    app._predict(trainer, trainer.predict)
    printed = json.loads(capsys.readouterr().out)["weights"]
    np.testing.assert_allclose(printed, numpy_training("keras3")[1], atol=1e-5)
