"""Callbacks in Keras 3's fit on any number of ranks."""

import tempfile

import ctl.hvd.keras as hvd
import keras
import numpy as np
from ctl.errors import UsageError
from measuring import RequestRecorder, comparable, examples, run, shared

X, Y = examples()


def network(optimizer=None, seed=0, dropout=False):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    if dropout:
        layers.insert(1, keras.layers.Dropout(0.5, seed=seed))
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1)), "mse")
    return model


class Every(keras.callbacks.Callback):
    """A callback that records the optimizer's values at the end of each batch and epoch."""

    def __init__(self):
        super().__init__()
        self.rates, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(round(float(self.model.optimizer.learning_rate.numpy()), 6))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def broadcast_after_the_first_batch():
    """Ranks with different initial weights continue with the weights of the last rank."""
    model = network(keras.optimizers.Adam(0.01), seed=hvd.rank(), dropout=True)
    x, y = shared(X, Y)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1)
    before = comparable(model.get_weights())["bits"]
    with RequestRecorder() as requests:
        model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[callback])
    seeds = [v for v in model.variables if "seed_generator" in v.path]
    return {
        "before": before,
        "after": comparable([v.value for v in [*model.trainable_weights, *model.optimizer.variables]]),
        "broadcasts": len([n for n in requests.names if "Broadcast" in n]),
        "seed": comparable([v.value for v in seeds])["bits"],
    }


def local_variables_stay():
    model = network(seed=hvd.rank())
    kernel = model.layers[-1].kernel
    model.trainable = False
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel])
    model.layers[-1].bias.assign([float(hvd.rank())] * 3)
    model.fit(X[:4], Y[:4], epochs=1, verbose=0, callbacks=[callback])
    return {"kernel": comparable([kernel.value])["bits"], "bias": float(model.layers[-1].bias.numpy()[0])}


def averaged_metrics():
    model = network()
    recorder, early_stop = Every(), keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    x, y = shared(X, Y)
    model.fit(
        x, y * (hvd.rank() + 1), batch_size=12, epochs=4, verbose=0,
        validation_data=(x, y * (hvd.rank() + 1)),
        callbacks=[hvd.callbacks.MetricAverageCallback(), early_stop, recorder],
    )  # fmt: skip
    return {"epochs": recorder.epochs, "history": model.history.history["val_loss"]}


def different_metrics_are_an_error_everywhere():
    model = network()
    model.fit(X[:4], Y[:4], verbose=0)  # all ranks must do as many steps
    logs = {"loss": 1.0} if hvd.rank() == 0 else {"loss": 1.0, "val_loss": 2.0}
    try:
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    except UsageError as e:
        return str(e)
    return "nothing was raised"


def warmed_up(optimizer, **options):
    model = network(optimizer)
    recorder = Every()
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, **options)
    later = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=3)
    model.fit(
        X[:8], Y[:8], batch_size=2, epochs=5, verbose=0, shuffle=False, callbacks=[warm, later, recorder]
    )
    return {"rates": recorder.rates, "logs": [round(logs["lr"], 6) for logs in recorder.epochs]}


def warm_up_and_schedule():
    return warmed_up(keras.optimizers.SGD(0.4))


def warm_up_of_a_scaled_loss():
    return warmed_up(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.4)))["rates"]


def momentum_is_scaled_with_the_rate():
    """One step at 0.1 and one at 0.01: the held step shrinks as the rate does."""
    weight = {}
    for corrected in (True, False):
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign([[0.0]])
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)),
            loss=lambda y, p: p,  # the gradient is 1
        )
        rate = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 0.1**epoch, momentum_correction=corrected
        )
        ones_batch = np.ones((1, 1), "float32")
        model.fit(ones_batch, ones_batch, epochs=2, verbose=0, callbacks=[rate])
        weight[str(corrected)] = round(float(model.layers[0].kernel.numpy()[0, 0]), 6)
    return weight


def a_schedule_object_is_refused():
    model = network(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
    warm = hvd.callbacks.LearningRateWarmupCallback(0.1)
    try:
        model.fit(X[:4], Y[:4], verbose=0, callbacks=[warm])
    except UsageError as e:
        return str(e)
    return "nothing was raised"


def best_model():
    model = network()
    results = {}
    try:
        model.fit(X[:4], Y[:4], verbose=0, callbacks=[hvd.callbacks.BestModelCheckpoint()])
    except UsageError as e:
        results["without"] = str(e)
    with tempfile.TemporaryDirectory() as folder:
        keep = hvd.callbacks.BestModelCheckpoint("loss", filepath=folder + "/best.keras")
        model.fit(X[:4], Y[:4], verbose=0, callbacks=[keep])
        results["loads"] = len(hvd.load_model(folder + "/best.keras").layers)
    return results


def values():
    rank = hvd.rank()
    return [
        float(hvd.allreduce(float(rank))),
        float(hvd.allreduce([rank + 1.0], op=hvd.Sum)[0]),
        float(hvd.allreduce(2.0, average=False, name="two")),
        np.asarray(hvd.allgather([rank])).tolist(),
        int(hvd.broadcast(rank, root_rank=hvd.size() - 1)),
        np.asarray(hvd.reducescatter([1.0] * hvd.size(), op=hvd.Sum)).tolist(),
    ]


run([
    broadcast_after_the_first_batch, local_variables_stay, averaged_metrics,
    different_metrics_are_an_error_everywhere, warm_up_and_schedule, warm_up_of_a_scaled_loss,
    momentum_is_scaled_with_the_rate, a_schedule_object_is_refused, best_model, values,
])  # fmt: skip
