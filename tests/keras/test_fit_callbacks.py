"""Callbacks of Keras in `ctl.fit` see, decide and write what they do in `Model.fit`."""

import csv

import ctl
import keras
import numpy as np
import pytest
from fitting import BATCH, classifier, numbers


class Seen(keras.callbacks.Callback):
    """Every call, with its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def note(self, *what, logs=None):
        self.calls.append((*what, dict(logs or {})))

    def on_train_begin(self, logs=None):
        self.note("train begins", self.params["epochs"], self.params["steps"])

    def on_train_end(self, logs=None):
        self.note("train ends", logs=logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.note("epoch begins", epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch ends", epoch, logs=logs)

    def on_test_begin(self, logs=None):
        self.note("test begins")

    def on_test_end(self, logs=None):
        self.note("test ends", logs=logs)


class SeenBatches(Seen):
    """Stops in the middle of an epoch; changes the learning rate at each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.note("batch begins", batch)
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch ends", batch, logs=logs)
        self.model.stop_training |= len(self.calls) > 30


class StopsItself(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def schedulers(directory):
    return [Seen(), keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.CSVLogger(directory / "log.csv"), StopsItself()]  # fmt: skip


def plateau(directory):
    rate = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.1, factor=0.3)
    best = keras.callbacks.ModelCheckpoint(directory / "best.weights.h5", "val_loss", save_best_only=True,
                                           save_weights_only=True)  # fmt: skip
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.1, restore_best_weights=True)
    return [Seen(), rate, best, stop]


def batches(directory):
    return [SeenBatches()]


def trained(make, directory, fit, **how):
    keras.utils.set_random_seed(1)
    model = classifier(keras.optimizers.SGD(0.1))
    callbacks = make(directory)
    x, y, _ = numbers()
    history = fit(model, x, y, batch_size=BATCH, epochs=5, shuffle=False, verbose=0,
                  callbacks=callbacks, validation_data=numbers(7, 21)[:2], **how)  # fmt: skip
    return history, model, callbacks[0].calls


@pytest.mark.parametrize("make", [schedulers, plateau, batches])
def test_callbacks_are_called_with_the_logs_of_model_fit_and_decide_the_same(make, tmp_path):
    paths = tmp_path / "keras", tmp_path / "ctl"
    for path in paths:
        path.mkdir()
    expected, model, calls = trained(make, paths[0], keras.Model.fit)
    found, other, seen = trained(make, paths[1], ctl.fit)
    assert found.epoch == expected.epoch and len(found.epoch) < 5
    assert other.stop_training is model.stop_training is True
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, atol=1e-6)
    assert [c[:-1] for c in seen] == [c[:-1] for c in calls]
    for mine, theirs in zip(seen, calls, strict=True):
        assert mine[-1] == pytest.approx(theirs[-1], abs=1e-6)
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert {p.name for p in paths[1].iterdir()} == {p.name for p in paths[0].iterdir()}
    if make is schedulers:
        rows = [list(csv.DictReader((path / "log.csv").open())) for path in paths]
        assert [r.keys() for r in rows[0]] == [r.keys() for r in rows[1]] and len(rows[1]) == 2


def test_lambdas_and_callbacks_of_ctl_work_together(caplog):
    x, y, _ = numbers()
    epochs, memory = [], ctl.MemoryCallback()
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append((epoch, logs)))
    ctl.fit(classifier(), x, y, BATCH, 2, verbose=0, callbacks=[memory, watch])
    assert [e for e, _ in epochs] == [0, 1] and set(epochs[0][1]) == {"loss", "accuracy"}
    assert [step for _, step, _ in memory.seen] == [7, 14]
    assert "called at each batch" not in caplog.text


def test_callbacks_of_batches_are_said_to_be_slower_and_see_calls_of_several_steps(caplog):
    x, y, _ = numbers(n=48)
    seen = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    ctl.fit(classifier(steps_per_execution=3), x, y, BATCH, 1, verbose=0, callbacks=[watch])
    assert seen == [2, 5]
    assert "LambdaCallback: called at each batch" in caplog.text


def test_a_run_that_a_callback_stopped_stays_stopped_when_it_is_resumed(tmp_path):
    x, y, _ = numbers()

    def run():
        watch = Seen()
        history = ctl.fit(classifier(), x, y, BATCH, 4, verbose=0, model_dir=tmp_path,
                          callbacks=[StopsItself(), watch])  # fmt: skip
        return history.epoch, [call[0] for call in watch.calls]

    assert run()[0] == [0, 1]
    assert run() == ([], ["train begins", "train ends"])


def test_an_epoch_that_was_interrupted_before_its_evaluation_has_all_its_logs(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise RuntimeError("the machine goes down")

    def run(*callbacks):
        watch = Seen()
        x, y, _ = numbers()
        ctl.fit(classifier(), x, y, BATCH, 1, verbose=0, model_dir=tmp_path, validation_data=(x, y),
                callbacks=[watch, *callbacks])  # fmt: skip
        return watch.calls

    with pytest.raises(RuntimeError):
        run(Fails())
    (ended,) = [call for call in run() if call[0] == "epoch ends"]
    assert ended[1] == 0 and set(ended[2]) == {"loss", "accuracy", "val_loss", "val_accuracy"}


class OfTestBatches(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


REFUSED = {
    "backup": (lambda: keras.callbacks.BackupAndRestore("/tmp/b"), r"checkpoints=ctl\.BackupCheckpoints"),
    "tensorboard": (lambda: keras.callbacks.TensorBoard("/tmp/b"), "give model_dir="),
    "averages": (keras.callbacks.SwapEMAWeights, r"ctl\.KerasTrainer"),
    "nan": (keras.callbacks.TerminateOnNaN, "NonFiniteError"),
    "test batches": (OfTestBatches, "Use on_test_begin and on_test_end"),
    "a list object": (lambda: keras.callbacks.CallbackList([]), "expected a list"),
    "a function": (lambda: print, "expected callbacks of Keras 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_callbacks_that_cannot_work_are_refused_with_what_to_write(case):
    make, words = REFUSED[case]
    x, y, _ = numbers()
    model = classifier()
    with pytest.raises(ctl.UsageError, match=words):
        ctl.fit(model, x, y, verbose=0, callbacks=[make()], validation_data=(x, y))
    assert not int(model.optimizer.iterations.numpy())


def test_a_callback_of_ctl_needs_no_metrics():
    class Epochs:
        ended = ()

        def after_epoch(self, trainer, epoch, step, means):
            self.ended += (epoch,)

    x, y, _ = numbers()
    epochs = Epochs()
    ctl.fit(classifier(), x, y, BATCH, 2, verbose=0, callbacks=[epochs])
    assert epochs.ended == (1, 2)
