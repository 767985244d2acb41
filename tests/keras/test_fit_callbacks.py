"""Keras callbacks in `ctl.fit`: calls, decisions and files, compared with `Model.fit`."""

import csv

import ctl
import keras
import numpy as np
import pytest
from conftest import some_of
from ctl.keras.backup import SaveOptions, replace_backup_callback
from fitting import BATCH, classifier, numbers


class CallRecorder(keras.callbacks.Callback):
    """Records every call with its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def record(self, *details, logs=None):
        self.calls.append((*details, dict(logs or {})))

    def on_train_begin(self, logs=None):
        self.record("train begins", self.params["epochs"], self.params["steps"])

    def on_train_end(self, logs=None):
        self.record("train ends", logs=logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.record("epoch begins", epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.record("epoch ends", epoch, logs=logs)

    def on_test_begin(self, logs=None):
        self.record("test begins")

    def on_test_end(self, logs=None):
        self.record("test ends", logs=logs)


class BatchCallRecorder(CallRecorder):
    """Stops in the middle of an epoch; changes the learning rate at each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.record("batch begins", batch)
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)

    def on_train_batch_end(self, batch, logs=None):
        self.record("batch ends", batch, logs=logs)
        self.model.stop_training |= len(self.calls) > 30

    def on_test_batch_begin(self, batch, logs=None):
        self.record("test batch begins", batch)

    def on_test_batch_end(self, batch, logs=None):
        self.record("test batch ends", batch, logs=logs)


class StopsItself(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def schedulers(directory):
    return [CallRecorder(), keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.CSVLogger(directory / "log.csv"), StopsItself()]  # fmt: skip


def plateau(directory):
    rate = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.1, factor=0.3)
    best = keras.callbacks.ModelCheckpoint(directory / "best.weights.h5", "val_loss", save_best_only=True,
                                           save_weights_only=True)  # fmt: skip
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.1, restore_best_weights=True)
    return [CallRecorder(), rate, best, stop]


def batches(directory):
    return [BatchCallRecorder()]


def trained(make, directory, fit, **options):
    keras.utils.set_random_seed(1)
    model = classifier(keras.optimizers.SGD(0.1))
    callbacks = make(directory)
    x, y, _ = numbers()
    history = fit(model, x, y, batch_size=BATCH, epochs=5, shuffle=False, verbose=0,
                  callbacks=callbacks, validation_data=numbers(7, 21)[:2], **options)  # fmt: skip
    return history, model, callbacks[0].calls


@pytest.mark.parametrize("make", [schedulers, plateau, batches])
def test_callbacks_are_called_with_the_logs_of_model_fit_and_decide_the_same(make, tmp_path):
    paths = tmp_path / "keras", tmp_path / "ctl"
    for path in paths:
        path.mkdir()
    keras_history, keras_model, keras_calls = trained(make, paths[0], keras.Model.fit)
    history, model, calls = trained(make, paths[1], ctl.fit)
    assert history.epoch == keras_history.epoch and len(history.epoch) < 5
    assert model.stop_training is keras_model.stop_training is True
    assert history.history.keys() == keras_history.history.keys()
    for name, values in keras_history.history.items():
        np.testing.assert_allclose(history.history[name], values, atol=1e-6)
    assert [c[:-1] for c in calls] == [c[:-1] for c in keras_calls]
    for call, keras_call in zip(calls, keras_calls, strict=True):
        assert call[-1] == pytest.approx(keras_call[-1], abs=1e-6)
    for a, b in zip(model.get_weights(), keras_model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert {p.name for p in paths[1].iterdir()} == {p.name for p in paths[0].iterdir()}
    if make is schedulers:
        rows = [list(csv.DictReader((path / "log.csv").open())) for path in paths]
        assert [r.keys() for r in rows[0]] == [r.keys() for r in rows[1]] and len(rows[1]) == 2


def test_lambdas_and_callbacks_of_ctl_work_together(caplog):
    x, y, _ = numbers()
    epochs, memory = [], ctl.MemoryCallback()
    recorder = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append((epoch, logs)))
    ctl.fit(classifier(), x, y, BATCH, 2, verbose=0, callbacks=[memory, recorder])
    assert [e for e, _ in epochs] == [0, 1] and set(epochs[0][1]) == {"loss", "accuracy"}
    assert [step for _, step, _ in memory.seen] == [7, 14]
    assert "has methods for batches" not in caplog.text


def test_a_callback_of_batches_is_warned_of_and_called_after_several_steps(caplog):
    x, y, _ = numbers(n=48)
    batches_seen = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches_seen.append(batch)
    )
    ctl.fit(classifier(steps_per_execution=3), x, y, BATCH, 1, verbose=0, callbacks=[recorder])
    assert batches_seen == [2, 5]
    assert "LambdaCallback has methods for batches" in caplog.text


def test_a_run_that_a_callback_stopped_stays_stopped_when_it_is_resumed(tmp_path):
    x, y, _ = numbers()

    def run():
        recorder = CallRecorder()
        history = ctl.fit(classifier(), x, y, BATCH, 4, verbose=0, model_dir=tmp_path,
                          callbacks=[StopsItself(), recorder])  # fmt: skip
        return history.epoch, [call[0] for call in recorder.calls]

    assert run()[0] == [0, 1]
    assert run() == ([], ["train begins", "train ends"])


def test_an_epoch_that_was_interrupted_before_its_evaluation_has_all_its_logs(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise RuntimeError("the machine shuts down")

    def run(*callbacks):
        recorder = CallRecorder()
        x, y, _ = numbers()
        ctl.fit(classifier(), x, y, BATCH, 1, verbose=0, model_dir=tmp_path, validation_data=(x, y),
                callbacks=[recorder, *callbacks])  # fmt: skip
        return recorder.calls

    with pytest.raises(RuntimeError):
        run(Fails())
    (ended,) = [call for call in run() if call[0] == "epoch ends"]
    assert ended[1] == 0 and set(ended[2]) == {"loss", "accuracy", "val_loss", "val_accuracy"}


@pytest.mark.parametrize(("save_freq", "steps"), [("epoch", None), (3, 3)])
def test_a_backup_saves_at_the_steps_of_its_frequency(save_freq, steps, tmp_path):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=save_freq)
    remaining, options = replace_backup_callback([backup], SaveOptions(None, None, None))
    assert remaining == [] and options.save_every_steps == steps
    assert isinstance(options.checkpoints, ctl.BackupCheckpoints)


class SecondBackup(keras.callbacks.BackupAndRestore):
    pass


REFUSED = {
    "a class of backups": (lambda: SecondBackup("/tmp/b"), r"ctl\.BackupCheckpoints\('/tmp/b'\)"),
    "tensorboard": (lambda: keras.callbacks.TensorBoard("/tmp/b", update_freq=1), "expected 'epoch'"),
    "averages": (keras.callbacks.SwapEMAWeights, r"ctl\.KerasTrainer"),
    "nan": (keras.callbacks.TerminateOnNaN, "NonFiniteError"),
    "a list object": (lambda: keras.callbacks.CallbackList([]), "expected the callbacks themselves"),
    "a function": (lambda: print, "expected callbacks of Keras 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_callbacks_are_refused_with_an_alternative(case):
    make, message = REFUSED[case]
    x, y, _ = numbers()
    model = classifier()
    with pytest.raises(ctl.UsageError, match=message):
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


class Failing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ZeroDivisionError


class FailingBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise ZeroDivisionError


def fail(epoch, logs):
    raise ZeroDivisionError


FAILING = {
    "Failing.on_epoch_end failed at step 7": Failing,
    "FailingBatch.on_train_batch_end failed at step 1": FailingBatch,
    "on_epoch_end of a Keras callback failed at step 7": lambda: keras.callbacks.LambdaCallback(
        on_epoch_end=fail
    ),
}
CASES = [(message, saves) for message in FAILING for saves in (True, False)]


@pytest.mark.parametrize("case", some_of(CASES, CASES[0], CASES[3]), ids=str)
def test_an_error_names_the_method_of_the_callback_and_a_save_only_if_there_is_one(case, tmp_path, caplog):
    message, saves = case
    x, y, _ = numbers()
    options = {"model_dir": str(tmp_path)} if saves else {}
    with pytest.raises(ZeroDivisionError):
        ctl.fit(classifier(), x, y, BATCH, 2, verbose=0, callbacks=[FAILING[message]()], **options)
    end = "the run ends after a last save." if saves else "the run ends."
    assert f"{message}; {end}" in caplog.text
