"""More behaviours: of callbacks, of `evaluate` and of `predict`. See keras_behaviours.py."""

import csv

import keras
from keras_behaviours import (
    BEHAVIOURS,
    FLOATS,
    VALIDATION,
    WEIGHTS,
    Calls,
    EpochLogs,
    OwnSteps,
    Sequence,
    ShapeOfBatch,
    X,
    Y,
    added_loss,
    batches,
    behaviour,
    classifier,
    of_class,
    regression,
    rows_of,
    structured,
    trained,
    with_callback,
)

callbacks = keras.callbacks
TRAIN_BATCHES = ("on_train_batch_begin", "on_train_batch_end")
TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")
PREDICT_BATCHES = ("on_predict_batch_begin", "on_predict_batch_end")
EPOCHS = ("on_epoch_begin", "on_epoch_end")


class WithEpochOfStop(callbacks.EarlyStopping):
    def result(self):
        return self.stopped_epoch, self.best_epoch, self.wait


class StopsAt(callbacks.Callback):
    """Sets an attribute of the model in a method, at a batch or an epoch."""

    def __init__(self, method, index, attribute="stop_training"):
        super().__init__()

        def stop(number, logs=None):
            if number == index:
                setattr(self.model, attribute, True)

        setattr(self, method, stop)


def calls(*methods, model=classifier, **options):
    """Returns a behaviour: the recorded calls of a training."""

    def run(verbs, _):
        recorder = Calls(*methods)
        trained(verbs, model(), callbacks=[recorder], validation_data=VALIDATION, **options)
        return recorder.calls

    return run


def early_stopping(options):
    return lambda _: WithEpochOfStop(**options)


BEHAVIOURS |= {
    "calls of a training": calls(),
    "calls of epochs": calls(*EPOCHS),
    "calls of batches": calls(*TRAIN_BATCHES),
    "calls of batches of two steps": calls(
        *TRAIN_BATCHES, model=lambda: classifier(steps_per_execution=2), batch_size=4),
    "calls of batches of three steps": calls(
        *TRAIN_BATCHES, model=lambda: classifier(steps_per_execution=3), batch_size=4),
    "calls of test batches in fit": calls(*TEST_BATCHES, "on_test_begin", "on_test_end"),
    "calls of test batches of two steps": calls(
        *TEST_BATCHES, model=lambda: classifier(steps_per_execution=2), validation_batch_size=4),
    "early stopping": with_callback(
        early_stopping({"monitor": "val_loss", "patience": 1, "min_delta": 0.2}), epochs=6),
    "early stopping, best": with_callback(
        early_stopping({"monitor": "val_accuracy", "patience": 2, "restore_best_weights": True}), epochs=6),
    "early stopping, baseline": with_callback(
        early_stopping({"monitor": "accuracy", "patience": 2, "baseline": 0.99}), epochs=6),
    "early stopping, later": with_callback(
        early_stopping({"monitor": "loss", "min_delta": 1.0, "start_from_epoch": 2}), epochs=6),
    "early stopping, maximum": with_callback(
        early_stopping({"monitor": "val_accuracy", "mode": "max", "patience": 1}), epochs=6),
    "early stopping of an unknown metric": with_callback(
        early_stopping({"monitor": "other", "mode": "min"}), epochs=2),
    "checkpoint of each epoch": with_callback(
        lambda d: callbacks.ModelCheckpoint(d / "{epoch:02d}-{loss:.4f}.keras")),
    "checkpoint of the best": with_callback(
        lambda d: callbacks.ModelCheckpoint(d / "best.keras", "val_loss", save_best_only=True)),
    "checkpoint of weights": with_callback(
        lambda d: callbacks.ModelCheckpoint(d / "{epoch}.weights.h5", save_weights_only=True)),
    "checkpoint of batches": with_callback(
        lambda d: callbacks.ModelCheckpoint(d / "{epoch}-{batch}.keras", save_freq=2), batch_size=4),
    "schedule of epochs": with_callback(lambda _: callbacks.LearningRateScheduler(lambda e, r: r * 0.3)),
    "plateau": with_callback(
        lambda _: callbacks.ReduceLROnPlateau("val_loss", 0.3, patience=1, min_delta=1.0, cooldown=1),
        epochs=5),
    "stop in a batch": with_callback(lambda _: StopsAt("on_train_batch_end", 1), batch_size=4),
    "stop in an epoch": with_callback(lambda _: StopsAt("on_epoch_end", 0), epochs=3),
    "lambda": with_callback(lambda _: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)),
    "TensorBoard": with_callback(lambda d: callbacks.TensorBoard(d / "logs")),
    "BackupAndRestore": with_callback(lambda d: callbacks.BackupAndRestore(d / "backup")),
}  # fmt: skip


@behaviour("CSVLogger")
def csv_logger(verbs, directory):
    trained(verbs, callbacks=[callbacks.CSVLogger(directory / "a.csv")], validation_data=VALIDATION)
    trained(verbs, callbacks=[callbacks.CSVLogger(directory / "a.csv", append=True)])
    rows = list(csv.DictReader((directory / "a.csv").open()))
    return [{name: float(value) for name, value in row.items() if value != "NA"} for row in rows]


@behaviour("a list of callbacks of Keras")
def callback_list(verbs, directory):
    model, recorder = classifier(), Calls(*EPOCHS)
    as_list = callbacks.CallbackList([recorder], add_history=True, model=model, epochs=2, verbose=0)
    return trained(verbs, model, callbacks=as_list), recorder.calls


@behaviour("a single callback")
def single(verbs, directory):
    recorder = EpochLogs()
    trained(verbs, callbacks=recorder)
    return recorder.logs


@behaviour("logs that a callback adds")
def added_logs(verbs, directory):
    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["added"] = epoch * 2.0

    return trained(verbs, callbacks=[Adds()])


@behaviour("parameters of callbacks")
def parameters(verbs, directory):
    recorder = Calls(*EPOCHS)
    model = classifier()
    history = verbs.fit(model, X, Y, epochs=2, verbose=0, callbacks=[recorder], batch_size=8)
    return recorder.params, history.params, recorder.model is model, history.model is model


@behaviour("two trainings")
def two_trainings(verbs, directory):
    model = classifier("adam")
    return trained(verbs, model), trained(verbs, model, initial_epoch=2, epochs=3), model.stop_training


@behaviour("compiled again")
def compiled_again(verbs, directory):
    model = regression()
    first = trained(verbs, model, y=FLOATS)
    model.compile("adam", "mae", metrics=["mse"])
    return first, trained(verbs, model, y=FLOATS)


@behaviour("the history of a model")
def model_history(verbs, directory):
    model = classifier()
    history = verbs.fit(model, X, Y, verbose=0)
    return model.history is history, isinstance(history, callbacks.History)


@behaviour("weights changed by a callback")
def changes_weights(verbs, directory):
    def zero(epoch, logs):
        if epoch == 0:
            model.set_weights([w * 0 for w in model.get_weights()])

    model = classifier()
    return trained(verbs, model, callbacks=[callbacks.LambdaCallback(on_epoch_end=zero)])


@behaviour("the learning rate of each batch")
def rate_of_batches(verbs, directory):
    class Rates(callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)

    return trained(verbs, callbacks=[Rates()], batch_size=4)


def limited(name, value):
    def run(verbs, directory):
        set_limit = getattr(keras.config, f"set_{name}")
        set_limit(value)
        try:
            model = classifier()
            result = trained(verbs, model, batch_size=4, epochs=3, validation_data=VALIDATION)
            return result, verbs.evaluate(model, X, Y, verbose=0), verbs.predict(model, X, verbose=0)
        finally:
            set_limit(None)

    return run


BEHAVIOURS |= {
    "limit of epochs": limited("max_epochs", 2),
    "limit of steps": limited("max_steps_per_epoch", 2),
}


def evaluated(make=classifier, x=X, y=Y, **options):
    def run(verbs, directory):
        model = make()
        if not model.built:
            model.build((None, 6))
        recorder = Calls("on_test_begin", "on_test_end")
        data = x() if callable(x) else x
        values = verbs.evaluate(model, data, y, verbose=0, callbacks=[recorder], **options)
        return values, recorder.calls

    return run


def predicted(make=classifier, x=X, methods=("on_predict_begin", "on_predict_end"), **options):
    def run(verbs, directory):
        recorder = Calls(*methods)
        data = x() if callable(x) else x
        outputs = verbs.predict(make(), data, verbose=0, callbacks=[recorder], **options)
        return outputs, recorder.calls

    return run


def of_test_batches(verbs, directory):
    recorder = Calls(*TEST_BATCHES, "on_test_begin")
    verbs.evaluate(classifier(), X, Y, verbose=0, callbacks=[recorder], batch_size=8)
    return recorder.calls


def with_counts():
    return regression(metrics=[ShapeOfBatch(name="counts"), "mae"])


def with_dropout():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def stopped(verb, method, attribute):
    def run(verbs, directory):
        stop = StopsAt(method, 1, attribute)
        data = {"y": Y} if verb == "evaluate" else {}
        result = getattr(verbs, verb)(classifier(), X, verbose=0, batch_size=4, callbacks=[stop], **data)
        return result

    return run


BEHAVIOURS |= {
    "evaluate": evaluated(),
    "evaluate: a list": evaluated(return_dict=False),
    "evaluate: only a loss": evaluated(regression, y=FLOATS, return_dict=False),
    "evaluate: metrics of a dictionary": evaluated(with_counts, y=FLOATS),
    "evaluate: a dictionary in a list": evaluated(with_counts, y=FLOATS, return_dict=False),
    "evaluate: weights": evaluated(sample_weight=WEIGHTS),
    "evaluate: steps": evaluated(batch_size=4, steps=3),
    "evaluate: a dataset": evaluated(x=batches, y=None),
    "evaluate: steps of an endless dataset": evaluated(x=lambda: batches(4, -1), y=None, steps=3),
    "evaluate: a generator": evaluated(x=lambda: rows_of(X, Y), y=None),
    "evaluate: a PyDataset": evaluated(x=Sequence, y=None),
    "evaluate: an own step": evaluated(of_class(OwnSteps), y=FLOATS),
    "evaluate: an added loss": evaluated(added_loss, y=FLOATS),
    "evaluate: structures": evaluated(structured, {"a": X, "b": FLOATS}, {"one": FLOATS, "two": Y}),
    "evaluate: batches": of_test_batches,
    "evaluate: stop": stopped("evaluate", "on_test_batch_end", "stop_evaluating"),
    "predict": predicted(),
    "predict: batch size": predicted(batch_size=7),
    "predict: a dataset": predicted(x=lambda: batches().map(lambda x, y: x)),
    "predict: a dataset with targets": predicted(x=batches),
    "predict: a generator": predicted(x=lambda: rows_of(X)),
    "predict: a PyDataset": predicted(x=Sequence),
    "predict: steps": predicted(batch_size=4, steps=2),
    "predict: an own step": predicted(of_class(OwnSteps)),
    "predict: structures": predicted(structured, {"a": X, "b": FLOATS}),
    "predict: dropout is off": predicted(with_dropout),
    "predict: batches": predicted(methods=("on_predict_batch_begin",), batch_size=8),
    "predict: ends of batches": predicted(methods=("on_predict_batch_end",), batch_size=8),
    "predict: stop": stopped("predict", "on_predict_batch_end", "stop_predicting"),
    "predict: uncompiled": predicted(lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])),
    "predict: ragged outputs": predicted(
        lambda: keras.Sequential([keras.Input((6,)), keras.layers.Reshape((2, 3))])),
}  # fmt: skip


def fitted(*callback_objects, **options):
    """Returns a function that trains with callbacks or options."""
    return lambda verbs, directory: trained(verbs, callbacks=list(callback_objects), **options)


# name -> (program, error message, text of the guide)
REFUSED = {
    "TerminateOnNaN": (fitted(callbacks.TerminateOnNaN()), "NonFiniteError", "`TerminateOnNaN`"),
    "SwapEMAWeights": (fitted(callbacks.SwapEMAWeights()), "KerasTrainer", "`SwapEMAWeights`"),
    "ProgbarLogger": (fitted(callbacks.ProgbarLogger()), "console", "`ProgbarLogger`"),
    "TensorBoard of batches": (
        lambda v, d: trained(v, callbacks=[callbacks.TensorBoard(d, update_freq=2)]),
        "update_freq=2; expected 'epoch'", "`update_freq`"),
    "TensorBoard with a profile": (
        lambda v, d: trained(v, callbacks=[callbacks.TensorBoard(d, profile_batch=(2, 3))]),
        "profile_batch", "`profile_batch`"),
    "a backup that stays": (
        lambda v, d: trained(v, callbacks=[callbacks.BackupAndRestore(d, delete_checkpoint=False)]),
        "expected delete_checkpoint=True", "`delete_checkpoint=False`"),
    "weights of classes and of examples": (
        lambda v, d: trained(v, class_weight={0: 2.0}, sample_weight=WEIGHTS),
        "expected one of them", "`class_weight` together with `sample_weight`"),
    "a generator without a length": (
        lambda v, d: trained(v, x=rows_of(X, Y), y=None), "give steps_per_epoch",
        "generators without `steps_per_epoch`"),
    "a generator as validation data": (
        lambda v, d: trained(v, validation_data=rows_of(*VALIDATION)), "give validation_steps",
        "without `validation_steps`"),
}  # fmt: skip
