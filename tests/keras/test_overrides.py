"""Models that override `fit`, `evaluate` or `predict`, such as the tasks of KerasHub."""

import functools

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from overriding import LINES, ReadsText, X, Y, compiled


class PreparesEvaluations(ReadsText):
    """A model that prepares the validation data in `evaluate`, as earlier versions of KerasHub do."""

    def fit(self, x=None, y=None, batch_size=None, **options):
        return keras.Sequential.fit(self, self.prepared(x, y, batch_size), **options)

    def evaluate(self, x=None, y=None, batch_size=None, **options):
        options.pop("_use_cached_eval_dataset", None)
        return keras.Sequential.evaluate(self, self.prepared(x, y, batch_size), **options)


def results(model, fit, evaluate, predict, **options):
    history = fit(LINES, Y, batch_size=8, epochs=2, verbose=0, validation_data=(LINES, Y), **options)
    evaluation = evaluate(LINES, Y, verbose=0, return_dict=True)
    return history.history, evaluation, predict(LINES, verbose=0)


def of_ctl(model, **options):
    verbs = (functools.partial(verb, model) for verb in (ctl.fit, ctl.evaluate, ctl.predict))
    return results(model, *verbs, **options)


def assert_close(first, second):
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), first, second)


@pytest.fixture(scope="module")
def expected():
    model = compiled(ReadsText)
    return results(model, model.fit, model.evaluate, model.predict)


MODELS = {"in fit": ReadsText, "in evaluate": PreparesEvaluations}
CASES = [(name, replicas) for name in MODELS for replicas in (1, 2)]


@pytest.mark.parametrize("case", some_of(CASES, ("in fit", 2)), ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_override_prepares_the_data_as_in_keras(case, expected):
    name, replicas = case
    with ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"][:replicas]).scope():
        model = compiled(MODELS[name])
    assert_close(of_ctl(model), expected)
    assert ctl.evaluate(model, LINES, Y, verbose=0, return_dict=False)[0] == pytest.approx(
        expected[1]["loss"], abs=1e-5
    )


class Scales(keras.Sequential):
    """A model that scales the data of an evaluation. Keras ignores this for data that `fit` has cached."""

    uses_cache = True

    def evaluate(self, x=None, y=None, **options):
        options["_use_cached_eval_dataset"] &= self.uses_cache
        return super().evaluate(3 * x, y, **options)


@pytest.mark.parametrize("uses_cache", [False, True])
def test_data_that_an_override_changes_are_evaluated_unless_keras_has_cached_them(uses_cache):
    histories = []
    for fit in (keras.Model.fit, ctl.fit):
        model = compiled(Scales)
        model.uses_cache = uses_cache
        histories.append(fit(model, X, Y, validation_data=(X, Y), verbose=0, shuffle=False).history)
    assert_close(*histories)


def test_an_override_resumes_from_a_checkpoint(tmp_path, expected):
    def train(epochs):
        return ctl.fit(compiled(ReadsText), LINES, Y, 8, epochs, verbose=0, model_dir=tmp_path, seed=1)

    assert train(1).epoch == [0]
    history = train(2)
    assert history.epoch == [1]
    assert history.history["loss"] == pytest.approx(expected[0]["loss"][1:], abs=1e-5)


def test_keras_has_its_own_methods_after_an_error_in_an_override():
    class Fails(ReadsText):
        def read(self, x, *targets):
            raise RuntimeError("no such file")

    method = keras.Model.fit
    with pytest.raises(RuntimeError, match="no such file"):
        ctl.fit(compiled(Fails), LINES, Y, verbose=0)
    assert keras.Model.fit is method


class OwnLoop(keras.Sequential):
    def fit(self, x, y):
        self.train_on_batch(x, y)

    def predict(self, x):
        return self(x)


class OtherSignature(keras.Sequential):
    def fit(self, inputs, targets, **options):
        return super().fit(inputs, targets, **options)

    def evaluate(self, x, y):
        return super().evaluate(x, y, verbose=0)


class DoublesResults(keras.Sequential):
    def evaluate(self, *arguments, **options):
        results = super().evaluate(*arguments, **options)
        return {name: 2 * value for name, value in results.items()}


class Stages(keras.Sequential):
    def fit(self, *arguments, **options):
        super().fit(*arguments, **options)
        return super().fit(*arguments, **options)


class Conditional(keras.Sequential):
    """A model that calls the method of Keras for named inputs only."""

    def fit(self, x, y, **options):
        return super().fit(x, y, **options) if isinstance(x, dict) else None


REFUSED = {
    "a call that is not reached": (
        Conditional, lambda m: ctl.fit(m, X, Y, verbose=0), r"Conditional\.fit does not call"),
    "own loop": (OwnLoop, lambda m: ctl.fit(m, X, Y), r"OwnLoop\.fit does not call keras\.Model\.fit"),
    "own prediction": (OwnLoop, lambda m: ctl.predict(m, X), "write the prediction as a predict_step"),
    "changed results": (
        DoublesResults, lambda m: ctl.fit(m, X, Y, validation_data=(X, Y), verbose=0), "only prepares"),
    "unknown argument": (
        OtherSignature, lambda m: ctl.evaluate(m, X, Y, batch_size=4), "does not accept these arguments"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_override_that_ctl_cannot_execute_is_refused_before_work_starts(case):
    cls, call, message = REFUSED[case]
    model = compiled(cls)
    weights = model.get_weights()
    with pytest.raises(ctl.UsageError, match=message):
        call(model)
    assert_close(model.get_weights(), weights)


def test_a_second_training_in_an_override_is_refused_with_a_directory_only(tmp_path):
    model = compiled(Stages)
    ctl.fit(model, X, Y, batch_size=10, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4
    with pytest.raises(ctl.UsageError, match="Leave model_dir and checkpoints out"):
        ctl.fit(compiled(Stages), X, Y, verbose=0, model_dir=tmp_path)


def test_inputs_are_positional_if_an_override_names_them_otherwise():
    assert ctl.fit(compiled(OtherSignature), X, Y, verbose=0).epoch == [0]
    assert ctl.fit(compiled(DoublesResults), X, Y, verbose=0).epoch == [0]  # evaluate is not called
    model = compiled(keras.Sequential)
    assert ctl.evaluate(compiled(DoublesResults), X, Y, verbose=0)["loss"] == pytest.approx(
        2 * ctl.evaluate(model, X, Y, verbose=0)["loss"]
    )


def test_a_model_compiled_outside_the_scope_is_refused():
    with ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ctl.UsageError, match=r"Call model\.compile under"):
        ctl.fit(model, X, X[:, :3], verbose=0)


@pytest.mark.slow
def test_a_task_of_keras_hub_reads_text():
    keras_hub = pytest.importorskip("keras_hub")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "good", "bad"]
    x, y = ["the film was good", "the film was bad"] * 8, [1, 0] * 8

    def make():
        keras.utils.set_random_seed(1)
        models = keras_hub.models
        tokenizer = models.BertTokenizer(vocabulary=vocabulary, lowercase=True)
        backbone = models.BertBackbone(
            vocabulary_size=len(vocabulary), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8,
            max_sequence_length=8, dropout=0.0,
        )  # fmt: skip
        return models.BertTextClassifier(
            backbone=backbone, num_classes=2, dropout=0.0,
            preprocessor=models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8),
        )  # fmt: skip

    model, options = make(), {"batch_size": 4, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
    expected = model.fit(x, y, **options).history, model.predict(x, verbose=0)
    with ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"]).scope():
        model = make()
    assert_close((ctl.fit(model, x, y, **options).history, ctl.predict(model, x, verbose=0)), expected)
