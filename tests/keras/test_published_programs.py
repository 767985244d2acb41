"""Programs like those on keras.io: numbers of `Model.fit`, or an error."""

import functools
import re

import ctl
import keras
import numpy as np
import published
import pytest
import tensorflow as tf
from conftest import some_of
from published import BATCH, OTHERS, OWN_STEPS, PROGRAMS, arrays, assert_same, regression, trained
from tensorflow.python.eager import context

ONE = tf.distribute.get_strategy


ON_REPLICAS = "captioner", "transfer", "normalized, an empty replica"
ON_ONE_DEVICE = "distiller, not built", "not reduced", "reshaped"


@functools.cache
def result_of_model_fit(name):
    return trained(name)


@pytest.mark.parametrize("name", some_of(PROGRAMS, *ON_ONE_DEVICE))
def test_on_one_device_every_program_has_the_numbers_of_model_fit(name):
    assert_same(trained(name, ONE()), result_of_model_fit(name))


@pytest.mark.parametrize("name", some_of({**OWN_STEPS, **OTHERS}, *ON_REPLICAS))
def test_on_two_replicas_a_program_has_the_numbers_of_one_device(name, two_replicas):
    assert_same(
        trained(name, two_replicas), result_of_model_fit(name), 2e-4 if "normalized" in name else 2e-5
    )


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_an_own_test_step_is_a_mean_over_the_validation_data(replicas, two_replicas):
    options = {"validation_data": (arrays(3, 21)[0],), "epochs": 1}
    strategy = two_replicas if replicas == 2 else ONE()
    assert_same(trained("denoiser", strategy, **options), trained("denoiser", **options))


def usage_error_of(make, strategy, *data, **options):
    with strategy.scope():
        model = make()
    with pytest.raises(ctl.UsageError) as error:
        ctl.fit(model, *data, batch_size=BATCH, verbose=0, **options)
    return str(error.value)


def regression_of(loss):
    return published.functional(keras.Model, loss=loss)


UNBUILT = "has no variables yet.*keras.Input"
ON_TWO_REPLICAS = {
    "a loss over the batch": (lambda: regression_of("dice"), arrays, "the loss dice"),
    "a fixed batch": (published.stateful, published.sequences, "made for batches of 16 rows"),
    "not reduced": (PROGRAMS["not reduced"][0], arrays, "has reduction=None"),
    "not built": (lambda: published.distiller(False), arrays, UNBUILT),
    "accumulation": (lambda: regression(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), arrays,
                     "Leave it out, or train on one device"),
    "odd batches": (regression, lambda: [tf.data.Dataset.from_tensor_slices(arrays()).batch(13)],
                    r"batches of x have 13 rows.*dataset\.batch\(12\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_TWO_REPLICAS)
def test_unsupported_models_on_replicas_are_refused_with_terms_of_keras(case, two_replicas):
    make, data, message_pattern = ON_TWO_REPLICAS[case]
    message = usage_error_of(make, two_replicas, *data(), own_step="mean")
    assert re.search(message_pattern, message), message
    for forbidden_text in ("build()", "self.", "--"):
        assert forbidden_text not in message


@pytest.mark.slow  # test_own_steps.py has a GAN too
def test_a_gan_takes_callbacks_of_keras():
    logs_by_epoch = []
    recorder = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs_by_epoch.append(sorted(logs))
    )
    assert_same(trained("adversaries", ONE(), callbacks=[recorder]), result_of_model_fit("adversaries"))
    assert logs_by_epoch == [["d_loss", "g_loss"]] * 3


def test_own_steps_on_two_replicas_need_the_option_own_step(two_replicas):
    make, data, _ = OWN_STEPS["distiller"]
    message = usage_error_of(make, two_replicas, *data())
    assert "Distiller has its own compute_loss" in message and 'own_step="mean"' in message
    message = usage_error_of(OWN_STEPS["siamese"][0], two_replicas, arrays()[0])
    assert "Siamese has its own train_step" in message
    assert "own_step is 'sum'; expected 'mean'" in usage_error_of(
        make, two_replicas, *data(), own_step="sum"
    )


class Rooted(published.Autoencoder):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "root": tf.sqrt(logs["error"])}


@pytest.mark.slow
def test_a_number_computed_from_a_metric_s_result_is_correct_on_one_device(monkeypatch):
    monkeypatch.setitem(PROGRAMS, "rooted", (lambda: published.compiled(Rooted()), published.inputs, {}))
    assert_same(trained("rooted", ONE()), trained("rooted"))


def test_a_number_computed_from_a_metric_s_result_is_refused_on_two_replicas(two_replicas):
    message = usage_error_of(
        lambda: published.compiled(Rooted()), two_replicas, arrays()[0], own_step="mean"
    )
    assert "'root', which depends on the result of a metric" in message


def test_an_own_test_step_that_is_not_used_is_not_refused(two_replicas):
    class Own(keras.Model):
        def test_step(self, data):
            raise AssertionError

    with two_replicas.scope():
        model = published.functional(Own, loss="mse")
    ctl.fit(model, *arrays(), batch_size=BATCH, verbose=0)


def test_statistics_that_change_on_each_replica_are_refused_and_can_be_synchronized(two_replicas):
    message = usage_error_of(published.normalized, two_replicas, *arrays())
    assert "BatchNormalization(synchronized=True), or ctl.fit(..., sync_batch_norm=True)" in message

    def masked():
        x = keras.Input((5, 3))
        hidden = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Masking()(x))
        return published.compiled(keras.Model(x, keras.layers.Dense(1)(hidden)), loss="mse")

    x = np.ones((32, 5, 3), np.float32)
    assert "with a mask" in usage_error_of(masked, two_replicas, x, x[:, :, :1])


def test_synchronize_batch_norm_reaches_the_layers_of_inner_models():
    inner = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((6,)), inner, keras.layers.BatchNormalization()])
    assert ctl.synchronize_batch_norm(model) == 2 and inner.layers[0].synchronized
    with pytest.raises(ctl.UsageError, match="expected a Keras 3 model"):
        ctl.synchronize_batch_norm(3)


class Evaluates(keras.callbacks.Callback):
    """Uses the model, and so its metrics, at the end of each epoch."""

    def __init__(self, use_model):
        super().__init__()
        self.use_model = use_model

    def on_epoch_end(self, epoch, logs=None):
        self.use_model(self.model)


USES = {
    "evaluate": lambda m: m.evaluate(*arrays(5), verbose=0),
    "predict": lambda m: m.predict(arrays()[0][:1], verbose=0),
    "test_on_batch": lambda m: m.test_on_batch(*arrays(5)),
    "metric": lambda m: m.metrics[-1].update_state(arrays()[1], arrays(5)[1]),
}


@pytest.mark.parametrize("use", some_of(USES, "evaluate", "metric"))
@pytest.mark.parametrize("validates", some_of([False, True], True))
def test_calls_of_the_model_in_a_callback_change_no_later_number(use, validates):
    histories = []
    for fit in (keras.Model.fit, ctl.fit):
        keras.utils.set_random_seed(1)
        model = regression(metrics=["mae"])
        options = {"validation_data": arrays(3, 21)} if validates else {}
        history = fit(model, *arrays(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0,
                      callbacks=[Evaluates(USES[use])], **options)  # fmt: skip
        histories.append(history.history)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5, err_msg=name)


def graphs():
    """Batches of four graphs with merged nodes: more rows of inputs than of targets."""

    def batches():
        generator = np.random.default_rng(0)
        for _ in range(6):
            sizes = generator.integers(2, 9, 4)
            nodes = generator.normal(size=(sizes.sum(), 6)).astype(np.float32)
            graph_ids = np.repeat(np.arange(4), sizes).astype(np.int32)
            yield (nodes, graph_ids), generator.normal(size=(4, 1)).astype(np.float32)

    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int32)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(6))


class GraphModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        nodes, graph_ids = inputs
        return tf.math.unsorted_segment_sum(self.out(nodes), graph_ids, tf.reduce_max(graph_ids) + 1)


def test_inputs_with_more_rows_than_targets_train_on_one_device_only(two_replicas, caplog):
    losses = []
    for fit in (keras.Model.fit, ctl.fit):
        keras.utils.set_random_seed(1)
        model = published.compiled(GraphModel(), loss="mse")
        losses.append(fit(model, graphs(), epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    with two_replicas.scope():
        model = published.compiled(GraphModel(), loss="mse")
    with pytest.raises(ctl.UsageError, match="inputs and targets of a batch have 4, 21 rows"):
        ctl.fit(model, graphs(), verbose=0)
    assert "train_data" not in caplog.text


def test_different_numbers_of_rows_are_detected_when_batches_are_read(two_replicas):
    x, y = arrays()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    data = data.map(lambda x, y: (tf.repeat(x, 2, axis=0), y))
    with two_replicas.scope():
        model = regression()
    with pytest.raises(ctl.UsageError, match="unequal numbers of rows"):
        ctl.fit(model, data, verbose=0)


ERRORS = {
    "rows": (lambda m: ctl.fit(m, arrays()[0], arrays()[1][:9], verbose=0), "x, y and sample_weight have"),
    "not batched": (lambda m: ctl.fit(m, tf.data.Dataset.from_tensor_slices(arrays()), verbose=0),
                    r"x is not batched: .* Write dataset\.batch\(batch_size\)"),
    "endless validation": (lambda m: ctl.fit(m, *arrays(), verbose=0, validation_data=tf.data.Dataset
                                             .from_tensor_slices(arrays()).batch(8).repeat()),
                           "validation_data is endless"),
    "not finite": (lambda m: ctl.fit(m, arrays()[0] * np.nan, arrays()[1], verbose=0),
                   r"NaN or infinite.*global_clipnorm=1\.0\.$"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_fit_name_its_arguments(case):
    fit_model, message = ERRORS[case]
    with pytest.raises(ctl.CtlError, match=message) as error:
        fit_model(regression())
    for forbidden_text in ("train_data", "eval_data", "global_batch_size", "self.", "--", "from_arrays"):
        assert forbidden_text not in str(error.value)


def test_a_batch_size_that_replicas_cannot_share_is_named_as_in_keras(two_replicas):
    with two_replicas.scope():
        model = regression()
    with pytest.raises(ctl.UsageError, match=r"^batch_size is 7, which 2 replicas cannot split evenly"):
        ctl.fit(model, *arrays(), batch_size=7, verbose=0)


def test_a_model_without_any_loss_is_refused_before_its_first_step():
    with pytest.raises(ctl.UsageError, match=r"no layer calls add_loss. Write compile\(loss=...\)"):
        ctl.fit(published.functional(keras.Model), *arrays(), verbose=0)


def test_a_batch_size_beside_batches_is_ignored_as_in_keras(caplog):
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return tuple(a[8 * i : 8 * i + 8] for a in arrays())

    history = ctl.fit(regression(), Data(), batch_size=4, verbose=0)
    assert history.params["steps"] == 3 and "batch_size=4 is ignored" in caplog.text


class EvaluationRecorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_test_begin(self, logs=None):
        self.calls.append("begin")

    def on_test_end(self, logs=None):
        self.calls.append(sorted(logs))


def test_evaluate_has_the_arguments_and_results_of_keras(two_replicas, capsys):
    model = regression(metrics=["mae"])
    with two_replicas.scope():
        model_on_replicas = regression(metrics=["mae"])
    model_on_replicas.set_weights(model.get_weights())
    expected = model.evaluate(*arrays(), 8, 0)
    for evaluated_model in (model, model_on_replicas):
        assert ctl.evaluate(evaluated_model, *arrays(), 7, 0, return_dict=False) == pytest.approx(
            expected, rel=1e-5
        )
        recorder = EvaluationRecorder()
        metrics = ctl.evaluate(evaluated_model, *arrays(), callbacks=[recorder])
        assert metrics == pytest.approx(dict(zip(("loss", "mae"), expected, strict=True)), rel=1e-5)
        assert recorder.calls == ["begin", ["loss", "mae"]]
    assert capsys.readouterr().out.count("evaluation: loss ") == 2
    assert ctl.evaluate(regression(), *arrays(), verbose=0, return_dict=False) > 0

    def batches():
        for i in range(3):
            yield tuple(a[8 * i : 8 * i + 8] for a in arrays())

    arrays_of_two_batches = [a[:16] for a in arrays()]
    metrics_of_two_batches = ctl.evaluate(model, batches(), verbose=0, steps=2)
    assert metrics_of_two_batches == pytest.approx(
        model.evaluate(*arrays_of_two_batches, verbose=0, return_dict=True), rel=1e-5
    )
    with pytest.raises(ctl.UsageError, match='verbose is 3; expected "auto"'):
        ctl.evaluate(model, *arrays(), verbose=3)


def test_a_model_without_an_optimizer_can_be_evaluated():
    model = regression()
    model.compile(optimizer=None, loss="mse")
    assert ctl.evaluate(model, *arrays(), verbose=0)["loss"] == pytest.approx(
        model.evaluate(*arrays(), verbose=0), rel=1e-5
    )
    with pytest.raises(ctl.UsageError, match="compiled without an optimizer"):
        ctl.fit(model, *arrays(), verbose=0)


def test_predictions_are_those_of_keras_for_any_number_of_rows(two_replicas):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])  # not compiled
    with two_replicas.scope():
        model_on_replicas = keras.Sequential([keras.layers.Dense(2)])  # and without variables
    ctl.predict(model_on_replicas, arrays()[0][:1])
    model_on_replicas.set_weights(model.get_weights())
    expected = model.predict(arrays()[0], verbose=0)
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(7)
    for predicting_model in (model, model_on_replicas):
        np.testing.assert_allclose(ctl.predict(predicting_model, arrays()[0], 5), expected, atol=1e-6)
        np.testing.assert_allclose(ctl.predict(predicting_model, data), expected, atol=1e-6)
        np.testing.assert_allclose(ctl.predict(predicting_model, data, steps=2), expected[:14], atol=1e-6)


class DoublesPredictions(keras.Model):
    def predict_step(self, data):
        return 2.0 * self(data[0] if isinstance(data, tuple) else data)


def test_an_own_predict_step_is_called():
    model = published.functional(DoublesPredictions)
    expected = model.predict(arrays()[0], verbose=0)
    np.testing.assert_allclose(ctl.predict(model, arrays()[0]), expected, atol=1e-6)


def test_texts_of_pandas_are_strings():
    x = keras.Input((1,), dtype="string")
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    texts = np.array(["a", "b", "other", b"a"] * 8, dtype=object)[:, None]
    y = np.arange(32.0)[:, None]
    losses = []
    for data in (texts, np.array([t if isinstance(t, str) else t.decode() for t in texts.flat])[:, None]):
        keras.utils.set_random_seed(1)
        model = published.compiled(keras.Model(x, keras.layers.Dense(1)(lookup(x))), loss="mse")
        losses.append(ctl.fit(model, data, y, epochs=2, verbose=0, validation_data=(data, y)).history)
    assert losses[0] == losses[1]


def test_the_seed_of_the_program_is_used_and_not_changed():
    keras.utils.set_random_seed(7)
    first = trained_noise()
    keras.utils.set_random_seed(7)
    assert trained_noise(seed=3) != first
    assert context.global_seed() == 7
    assert trained_noise() == first


def trained_noise(**options):
    model = PROGRAMS["noisy"][0]()
    model.set_weights([np.ones(w.shape) for w in model.get_weights()])
    return ctl.fit(model, arrays()[0], verbose=0, shuffle=False, **options).history["noisy_loss"]
