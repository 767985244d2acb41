"""`ctl.fit` is `Model.fit`, number for number, on one device and on two replicas."""

import functools
import inspect

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import some_of
from ctl.callbacks.schedule import AT_THE_END
from fitting import BATCH, CASES, assert_same, classifier, fitted, numbers
from kernels import pretend_kernel


@functools.cache
def result_of_model_fit(name):
    return fitted(name)


@pytest.fixture(scope="module")
def pair():
    return ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])


# cases with different code on one device: no batch and no loss scale is divided
ONE_DEVICE_CASES = "adam", "weights of examples", "masks", "two outputs", "subclassed", "half precision"


@pytest.mark.parametrize("name", some_of(ONE_DEVICE_CASES, "adam"))
def test_three_epochs_on_one_device_are_those_of_model_fit(name):
    assert_same(name, fitted(name, tf.distribute.get_strategy()), result_of_model_fit(name))


FAST_CASES = "adam", "weights of examples", "masks, one layer", "subclassed"


@pytest.mark.parametrize("name", some_of(CASES, *FAST_CASES))
def test_three_epochs_are_those_of_model_fit(name, pair):
    assert_same(name, fitted(name, pair), result_of_model_fit(name))


@pytest.fixture(scope="module")
def central():
    return ctl.make_strategy("central_storage", devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("name", some_of(["subclassed", "weights of examples"], "subclassed"))
def test_central_storage_has_the_losses_and_metrics_of_model_fit(name, central):
    assert_same(name, fitted(name, central), result_of_model_fit(name))


@pytest.mark.parametrize(
    ("name", "message"), [("half precision", "scales the loss"), ("normalised", "cannot combine")]
)
def test_unsupported_options_of_central_storage_are_refused(name, message, central):
    with pytest.raises(ctl.UsageError, match=message):
        fitted(name, central)


def test_arrays_are_reshuffled_every_epoch_and_each_example_occurs_once():
    x = np.arange(20, dtype=np.float32)[:, None]
    batches_in_training = []

    class InputRecorder(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training:
                tf.py_function(lambda v: batches_in_training.append(v.numpy()[:, 0].tolist()), [inputs], [])
            return inputs

    model = keras.Sequential([keras.Input((1,)), InputRecorder(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ctl.fit(model, x, x, batch_size=8, epochs=2, verbose=0)
    assert [len(b) for b in batches_in_training] == [8, 8, 4] * 2
    epochs = [sum(batches_in_training[:3], []), sum(batches_in_training[3:], [])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_evaluate_counts_every_example_once(pair):
    x, y, w = numbers(3, 21)
    expected = (model := classifier()).evaluate(x, y, sample_weight=w, return_dict=True, verbose=0)
    with pair.scope():
        model_on_replicas = classifier()
    model_on_replicas.set_weights(model.get_weights())
    for metrics in (
        ctl.evaluate(model, x, y, sample_weight=w),
        ctl.evaluate(model_on_replicas, x, y, sample_weight=w),
    ):
        assert metrics == pytest.approx(expected, abs=1e-5)


def test_a_finite_dataset_restarts_and_validation_has_its_own_frequency():
    x, y, _ = numbers()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = ctl.fit(classifier(), data, epochs=5, steps_per_epoch=4, verbose=0,
                      validation_data=(x, y), validation_freq=2)  # fmt: skip
    assert history.epoch == [0, 1, 2, 3, 4]
    assert len(history.history["loss"]) == 5 and len(history.history["val_loss"]) == 2


class CallRecorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append((epoch, sorted(logs)))

    def on_train_end(self, logs=None):
        self.calls.append("end")


EPOCHS = {
    "listed": {"validation_freq": [1, 4, 9]}, "from 3": {"validation_freq": 2, "initial_epoch": 3},
    "from 2": {"validation_freq": 2, "initial_epoch": 2}, "none": {"initial_epoch": 6},
    "none, from 7": {"initial_epoch": 7},
}  # fmt: skip


@pytest.mark.parametrize("case", some_of(EPOCHS, "from 3", "none", "none, from 7"))
def test_epochs_and_their_evaluations_are_those_of_keras(case):
    x, y, _ = numbers()
    histories, calls = [], []
    for fit in (keras.Model.fit, ctl.fit):
        callback = CallRecorder()
        history = fit(classifier(), x, y, epochs=6, verbose=0, validation_data=(x, y), callbacks=[callback],
                      **EPOCHS[case])  # fmt: skip
        histories.append((history.epoch, {name: len(v) for name, v in history.history.items()}))
        calls.append(callback.calls)
    assert histories[0] == histories[1] and calls[0] == calls[1]


class TwoResults(keras.metrics.Mean):
    """Returns two numbers by name."""

    def __init__(self):
        super().__init__(name="results")

    def update_state(self, targets, outputs, sample_weight=None):
        super().update_state(outputs)

    def result(self):
        mean = super().result()
        return {"once": mean, "twice": 2 * mean}


class Traced(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="traced")
        self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

    @tf.function
    def update_state(self, targets, outputs, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(outputs))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


@pytest.mark.parametrize("metric", [TwoResults, Traced])
def test_metrics_with_several_results_or_a_tf_function_have_the_numbers_of_keras(metric):
    x, y, _ = numbers()
    histories = []
    for fit in (keras.Model.fit, ctl.fit):
        keras.utils.set_random_seed(1)
        model = classifier()
        model.compile("sgd", model.loss, metrics=[metric()])
        histories.append(fit(model, x, y, epochs=2, shuffle=False, verbose=0).history)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, abs=1e-4), name


def test_a_stop_at_an_epoch_without_an_evaluation_ends_it_once():
    x, y, _ = numbers()
    calls = []
    for fit in (keras.Model.fit, ctl.fit):
        callback = CallRecorder()
        stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
        stop.on_epoch_end = lambda epoch, logs=None, stop=stop: setattr(stop.model, "stop_training", True)
        fit(classifier(), x, y, epochs=4, verbose=0, validation_data=(x, y), validation_freq=2,
            callbacks=[callback, stop])  # fmt: skip
        calls.append(callback.calls)
    assert calls[1] == calls[0]


def test_run_eagerly_has_the_same_numbers_and_warns_that_steps_are_graphs(caplog):
    x, y, _ = numbers()
    losses = []
    for fit in (keras.Model.fit, ctl.fit):
        keras.utils.set_random_seed(1)
        model = classifier()
        model.run_eagerly = True
        losses.append(fit(model, x, y, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert caplog.text.count("run_eagerly=True has no effect") == 1


def test_short_batches_cause_no_warning(caplog):
    x, y, _ = numbers()
    ctl.fit(classifier(), x, y, BATCH, 2, verbose=0)
    assert "average() divides" not in caplog.text


def test_a_model_of_another_scope_is_refused(pair):
    trainer = ctl.KerasTrainer(classifier(), train=numbers()[:2], strategy=pair, global_batch_size=8)
    with pytest.raises(ctl.UsageError, match="outside the strategy's scope"):
        trainer.train(1)


def test_a_function_that_makes_the_model_is_called_in_the_scope():
    trainer = ctl.KerasTrainer(
        classifier, train=numbers()[:2], strategy="default", global_batch_size=BATCH, writers=[]
    )
    trainer.train(3)
    assert trainer.step == 3 and trainer.model.optimizer.iterations.numpy() == 3


def test_a_trainer_without_validation_data_trains_and_names_its_argument_where_they_are_needed(caplog):
    options = {"strategy": "default", "global_batch_size": BATCH, "writers": []}
    trainer = ctl.KerasTrainer(
        classifier, train=numbers()[:2], intervals=ctl.Intervals(evaluate=AT_THE_END), **options
    )
    assert "loss" in trainer.train(2) and "eval_" not in caplog.text
    with pytest.raises(ctl.UsageError, match=r"has no eval_data.* Pass validation=\(x, y\) to Keras"):
        trainer.evaluate()
    every = ctl.Intervals(evaluate=ctl.Every(steps=1))
    with pytest.raises(ctl.UsageError, match=r"\(KerasTrainer: pass validation=\.\.\.\)"):
        ctl.KerasTrainer(classifier, train=numbers()[:2], intervals=every, **options).train(2)


def test_the_evaluation_data_of_a_subclass_is_used():
    class Validated(ctl.KerasTrainer):
        def eval_data(self, batch_size):
            return ctl.from_arrays(numbers()[:2], batch_size)

    trainer = Validated(classifier, train=None, strategy="default", global_batch_size=BATCH)
    assert trainer.evaluate()["loss"] > 0


def test_an_interrupted_run_resumes(tmp_path):
    class Interrupted(Exception):
        pass

    class Interrupts(ctl.MemoryWriter):
        def __init__(self, at):
            super().__init__()
            self.at = at

    def run(directory, epochs, **options):
        keras.utils.set_random_seed(1)
        model = classifier()
        x, y, _ = numbers()
        history = ctl.fit(model, x, y, batch_size=BATCH, epochs=epochs, verbose=0,
                          model_dir=directory, **options)  # fmt: skip
        return model.get_weights(), history.history["loss"]

    uninterrupted, losses = run(None, 5)
    run(tmp_path / "a", 2)
    resumed, later_losses = run(tmp_path / "a", 5)
    for a, b in zip(uninterrupted, resumed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert later_losses == losses[2:]


def test_a_backup_is_restored_and_removed_after_success(tmp_path):
    class Stops(ctl.KerasTrainer):
        def after_loop(self, step, means):
            if step == 9:
                raise RuntimeError("the machine shuts down")

    def run(cls=ctl.KerasTrainer):
        x, y, _ = numbers()
        trainer = cls(
            classifier, train=(x, y), strategy="default", global_batch_size=BATCH, writers=[],
            checkpoints=ctl.BackupCheckpoints(tmp_path / "backup"),
            intervals=ctl.Intervals(steps_per_loop=1, save=ctl.Every(steps=4)),
        )  # fmt: skip
        trainer.prepare()
        start = trainer.step
        trainer.train(12)
        return start

    with pytest.raises(RuntimeError):
        run(Stops)
    assert [p.name for p in (tmp_path / "backup").iterdir()] == ["ckpt-9"]
    assert run() == 9
    assert not (tmp_path / "backup").exists()
    assert run() == 0


def uncompiled():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])


def without_a_loss():
    model = uncompiled()
    model.compile("sgd")
    return model


def of_tf_keras():
    model = tf_keras.Sequential([tf_keras.layers.InputLayer((6,)), tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


X, Y, W = numbers()
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
REFUSED = {
    "not compiled": (uncompiled, (X, Y), {}, "not compiled"),
    "tf_keras": (of_tf_keras, (X, Y), {}, "expected a Keras 3 model"),
    "backup": (classifier, (X, Y), {"callbacks": keras.callbacks.BackupAndRestore("/tmp/b"),
                                         "model_dir": "/tmp/m"}, r"checkpoints=ctl\.BackupCheckpoints"),
    "a list": (classifier, ([1.0], [2.0]), {}, "expected arrays, a tf.data.Dataset"),
    "targets beside a dataset": (classifier, (DATA, Y), {}, "contains the targets and weights"),
    "an endless dataset": (classifier, (DATA.repeat(),), {}, "steps_per_epoch"),
    "validation_freq": (classifier, (X, Y), {"validation_split": 0.5, "validation_freq": 0},
                        "validation_freq is 0"),
    "epochs of validation_freq": (classifier, (X, Y), {"validation_split": 0.5, "validation_freq": [0.5]},
                                  "an epoch of validation_freq is 0.5"),
    "a generator to validate with": (classifier, (X, Y), {"validation_data": (batch for batch in [(X, Y)])},
                                     "give validation_steps"),
    "all of the examples to validate with": (classifier, (X, Y), {"validation_split": 1.0},
                                             "expected a number >= 0 and < 1"),
    "no targets": (classifier, (X,), {}, "the training data have inputs and no targets"),
    "no targets to validate with": (classifier, (X, Y), {"validation_data": X},
                                    r"the evaluation data have inputs and no targets.*expected \(x, y\)"),
    "no loss": (without_a_loss, (X, Y), {}, "without a loss"),
    "both weights": (classifier, (X, Y), {"sample_weight": W, "class_weight": {0: 1.0}}, "one of them"),
    "no evaluation to watch": (classifier, (X, Y), {"callbacks": [ctl.EarlyStopping("loss")]},
                               "there are no evaluations|but there are none"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused_with_a_sentence(case):
    make, arguments, options, message = REFUSED[case]
    model = make()
    with pytest.raises(ctl.UsageError, match=message):
        ctl.fit(model, *arguments, verbose=0, **options)
    assert case in ("not compiled", "tf_keras") or not int(model.optimizer.iterations.numpy())


@pytest.mark.parametrize("verbose", some_of([0, 1, 2], 1, 2))
def test_verbose_is_that_of_keras(verbose, monkeypatch, capfd, tmp_path):
    displays = pretend_kernel(monkeypatch)
    x, y, _ = numbers()
    for epochs in (1, 2):
        ctl.fit(classifier(), x, y, epochs=epochs, verbose=verbose, model_dir=str(tmp_path / "m"))
    printed = capfd.readouterr()
    assert printed.err == ""
    assert ("done at step" in printed.out) == (verbose > 0)
    assert ("\nEpoch " in printed.out) == (verbose > 0)
    assert (" - accuracy: " in printed.out) == (verbose == 2)
    assert len(displays) == (2 if verbose == 1 else 0)  # a bar for each epoch; the second run resumes
    assert bool(printed.out) == (verbose > 0)


def test_another_verbose_is_refused():
    with pytest.raises(ctl.UsageError, match="verbose is 'quiet'; expected"):
        ctl.fit(classifier(), *numbers()[:2], verbose="quiet")


def test_repr_of_a_history_has_its_newest_numbers():
    x, y, _ = numbers()
    history = ctl.fit(classifier(), x, y, epochs=2, validation_data=(x, y), verbose=0)
    text = repr(history)
    newest = {name: values[-1] for name, values in history.history.items()}
    assert text == "History(2 epochs: " + ", ".join(f"{n} {v:.4g}" for n, v in newest.items()) + ")"
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(newest)
    assert repr(ctl.keras.fit.History()) == "History(0 epochs)"


def test_arguments_by_position_are_those_of_model_fit():
    ours, theirs = (list(inspect.signature(f).parameters) for f in (ctl.fit, keras.Model.fit))
    assert ours[: len(theirs)] == ["model", *theirs[1:]]
