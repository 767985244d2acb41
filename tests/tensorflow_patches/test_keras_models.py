"""Private attributes and methods of Keras 3 models."""

import keras
import numpy as np
import pytest
from ctl.tensorflow_patches import keras_models

X, Y = np.ones([4, 3], "float32"), np.zeros([4, 1], "float32")


@pytest.fixture
def model():
    class Regularized(keras.layers.Dense):
        def call(self, inputs):
            self.add_loss(keras.ops.sum(self.kernel) * 0.0)
            return super().call(inputs)

    model = keras.Sequential([Regularized(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"], weighted_metrics=[])
    return model


def test_a_symbolic_build_creates_all_variables(model):
    assert not model.built
    keras_models.build_symbolically(model, (X, Y))
    assert model.built and len(model.variables) == 2
    assert len(keras_models.compiled_metrics(model).variables) > 0


def test_the_compiled_losses_and_metrics(model):
    keras_models.build_symbolically(model, (X, Y))
    predicted = model(X)
    mean_square = float(np.mean(np.square(predicted)))
    assert float(keras_models.compiled_loss(model)(Y, predicted)) == pytest.approx(mean_square)
    (loss,) = keras_models.compiled_loss_objects(model)
    assert loss.fn is keras.losses.mean_squared_error
    (metric,) = keras_models.compiled_metrics(model).metrics
    assert keras_models.metric_function(metric) is keras.losses.mean_absolute_error
    assert keras_models.metric_function(keras.metrics.Mean()) is None
    assert keras_models.compiled_metrics_of_user(model) == ["mae"]
    assert keras_models.compile_argument(model, "loss") == "mse"
    assert keras_models.compile_argument(object(), "loss") is None


def test_the_loss_of_a_step_includes_added_losses(model):
    keras_models.build_symbolically(model, (X, Y))
    loss = keras_models.compute_loss(model, X, Y, model(X), None, training=True)
    assert float(loss) > 0.0
    assert keras_models.has_added_losses(model.layers[0])
    assert not keras_models.has_added_losses(keras.layers.Dense(1))
    tracker = keras_models.loss_tracker(model)
    assert tracker.name == "loss" and tracker in model.metrics


def test_a_model_without_losses():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd")
    assert keras_models.compiled_loss(model) is None
    assert keras_models.compiled_loss_objects(model) == []
    assert keras_models.compiled_metrics_of_user(model) is None


def test_the_order_of_results_is_that_of_evaluate(model):
    expected = model.evaluate(X, Y, verbose=0)
    results = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert keras_models.results_in_order(model, results) == expected


def test_the_layers_and_the_argument_of_a_call(model):
    assert keras_models.flattened_layers(model) == [model, *model.layers]
    assert keras_models.flattened_layers(object()) == []
    assert keras_models.has_training_argument(model)

    class WithoutArgument(keras.Model):
        def call(self, x):
            return x

    assert not keras_models.has_training_argument(WithoutArgument())


def test_the_strategy_of_a_model(two_replicas):
    with two_replicas.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    assert keras_models.strategy_of_model(model, None) is two_replicas
    assert keras_models.strategy_of_model(object(), "default") == "default"


def test_methods_that_a_callback_inherits():
    class Own(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            pass

    callback = Own()
    assert keras_models.is_default(callback.on_test_batch_begin)
    assert not keras_models.is_default(callback.on_test_batch_end)
