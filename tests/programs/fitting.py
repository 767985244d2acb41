"""Compiled Keras models of many kinds, trained by `Model.fit` or by `ctl.fit`. As a program, a worker."""

import functools
import json
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf

EXAMPLES, BATCH, EPOCHS = 52, 8, 3  # 7 steps an epoch, the last of them with 4 rows: 21 steps
layers = keras.layers


def numbers(seed=0, n=EXAMPLES):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, 6)).astype(np.float32)
    return x, generator.integers(0, 3, n), generator.uniform(0.2, 2, n).astype(np.float32)


def classifier(optimizer=None, **compiled):
    model = keras.Sequential([
        keras.Input((6,)), layers.Dense(12, activation="tanh", kernel_regularizer="l2"), layers.Dense(3),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": optimizer or "adam", "loss": loss, "metrics": ["accuracy"], **compiled})
    return model


def two_outputs():
    x = keras.Input((6,), name="x")
    hidden = layers.Dense(8, activation="tanh")(x)
    outputs = {"kind": layers.Dense(3, name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    model = keras.Model(x, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3}, metrics={"kind": ["accuracy"], "size": ["mae"]},
    )  # fmt: skip
    return model


def tagger(recurrent=True):
    """Returns a model of masked sentences. The loss is the mean over all words in a batch."""
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True),
        *([layers.LSTM(6, return_sequences=True)] if recurrent else []),
        layers.Dense(3, activation="softmax"),
    ])  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Subclassed(keras.Model):
    """A model without variables before its first call."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, activation="relu"), layers.Dense(1, activation="sigmoid")

    def call(self, x):
        return self.out(self.hidden(x))


def subclassed():
    model = Subclassed()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), "binary_crossentropy",
                  metrics=["accuracy", keras.metrics.AUC(num_thresholds=20, name="auc")])  # fmt: skip
    return model


def normalised():
    model = keras.Sequential([
        keras.Input((6,)), layers.Dense(8, use_bias=False),
        layers.BatchNormalization(synchronized=True), layers.Dense(3),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss)
    return model


def classifier_of_policy(policy):
    def make():
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            return classifier(keras.optimizers.SGD(0.01))
        finally:
            keras.mixed_precision.set_dtype_policy("float32")

    return make


def squared(labels, predicted):
    """Returns a loss that is already averaged."""
    return keras.ops.mean(keras.ops.square(labels - predicted))


def has_mean_activity_losses():
    """Returns whether Keras divides activity losses by the number of rows. Older versions do not."""
    layer = layers.ActivityRegularization(l2=1.0)
    layer(np.ones((2, 1)))
    return float(layer.losses[0]) == 1.0


def active():
    """Returns a model with activity losses, which differ between replicas."""
    regularizer = keras.regularizers.L2(0.1)
    if not has_mean_activity_losses():
        regularizer = lambda outputs: 0.1 * keras.ops.mean(keras.ops.sum(outputs**2, axis=1))  # noqa: E731
    model = keras.Sequential([
        keras.Input((6,)), layers.Dense(8, activity_regularizer=regularizer), layers.Dense(1),
    ])  # fmt: skip
    model.compile(keras.optimizers.SGD(0.02), squared)
    return model


def tagged_words():
    generator = np.random.default_rng(4)
    x = generator.integers(1, 9, (EXAMPLES, 5))
    x[np.arange(5) >= generator.integers(1, 6, EXAMPLES)[:, None]] = 0
    return x, x % 3


def sized():
    x, y, _ = numbers()
    return x, {"kind": y, "size": x[:, :1] * 2}


def dataset():
    x, y, w = numbers()
    return (tf.data.Dataset.from_tensor_slices((x, y, w)).batch(BATCH),)


def endless():
    x, y, _ = numbers()
    return (tf.data.Dataset.from_tensor_slices((x, y)).shuffle(52, seed=3).repeat().batch(BATCH),)


def examples():
    return numbers()[:2]


def with_optimizer(make):
    return lambda: classifier(make())


VALIDATION = {"validation_data": numbers(7, 21)[:2]}
VALIDATION_OF_ONE = {"validation_data": (numbers(7, 21)[0], numbers(7, 21)[0][:, :1])}
# name -> (model, positional arguments, keyword arguments)
CASES = {
    "adam": (classifier, examples, VALIDATION),
    "global clip": (with_optimizer(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.2)), examples, {}),
    "weight decay": (with_optimizer(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)), examples, {}),
    "average": (with_optimizer(lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8)),
                examples, {}),
    "average every 5": (with_optimizer(lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5)), examples, {}),
    "weights of classes": (lambda: classifier(weighted_metrics=["accuracy"]), examples,
                           {"class_weight": {0: 0.5, 2: 3.0}}),
    "weights of examples": (classifier, examples,
                            {"sample_weight": numbers()[2], "validation_split": 0.25}),
    "weighted dataset": (lambda: classifier(weighted_metrics=["accuracy"]), dataset, {}),
    "endless dataset": (classifier, endless, {"steps_per_epoch": 7}),
    "two outputs": (two_outputs, sized, {}),
    "masks": (tagger, tagged_words, {}),
    "masks, one layer": (lambda: tagger(recurrent=False), tagged_words, {}),
    "masks, whole batches": (tagger, lambda: tuple(a[:48] for a in tagged_words()), {}),
    "active": (active, lambda: (numbers()[0], numbers()[0][:, :1] * 2), VALIDATION_OF_ONE),
    "weighted scalar": (active, lambda: (numbers()[0], numbers()[0][:, :1] * 2),
                        {"sample_weight": numbers()[2]}),
    "subclassed": (subclassed, lambda: (numbers()[0], (numbers()[1] == 1).astype(np.float32)), {}),
    "normalised": (normalised, examples, VALIDATION),
    "half precision": (classifier_of_policy("mixed_float16"), examples, {}),
    "bfloat16": (classifier_of_policy("mixed_bfloat16"), examples, {}),
    "sum": (lambda: classifier(keras.optimizers.SGD(0.001), loss=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum")), examples, {}),
}  # fmt: skip


def fitted(name, strategy=None):
    """Returns history and weights of one case, of `ctl.fit` under a strategy, else of `Model.fit`."""
    make, arguments, options = CASES[name]
    keras.utils.set_random_seed(1)
    options = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, **options}
    arguments = arguments()
    if not isinstance(arguments[0], tf.data.Dataset):
        options["batch_size"] = BATCH
    if strategy is None:
        model = make()
        history = model.fit(*arguments, **options)
    else:
        with strategy.scope():
            model = make()
        history = ctl.fit(model, *arguments, **options)
    return {"history": {k: list(map(float, v)) for k, v in history.history.items()},
            "epoch": list(history.epoch), "weights": [w.tolist() for w in model.get_weights()]}  # fmt: skip


class ChiefDecides(keras.callbacks.Callback):
    """A callback with decisions that differ between workers. The decisions of `task` 0 must apply."""

    def __init__(self, task):
        super().__init__()
        self.task, self.seen = task, []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + epoch + self.task)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([epoch, logs, float(self.model.optimizer.learning_rate.numpy())])
        self.model.stop_training = epoch == (1 if self.task == 0 else 0)


def agreed(strategy, directory):
    """Returns callback records and results of a task with callbacks that decide independently."""
    keras.utils.set_random_seed(1)
    task = strategy.cluster_resolver.task_id if strategy else 0
    with (strategy or tf.distribute.get_strategy()).scope():
        model = classifier(keras.optimizers.SGD(0.1))
    callback = ChiefDecides(task)
    files = [keras.callbacks.CSVLogger(f"{directory}/{task}.csv"),
             keras.callbacks.ModelCheckpoint(f"{directory}/{task}.keras")]  # fmt: skip
    fit = functools.partial(ctl.fit, model) if strategy else model.fit
    history = fit(*examples(), batch_size=BATCH, epochs=4, shuffle=False, verbose=0,
                  callbacks=[callback, *files])  # fmt: skip
    return {"seen": callback.seen, "history": history.history, "stop": model.stop_training,
            "weights": [w.tolist() for w in model.get_weights()]}  # fmt: skip


# float16 rounds coarsely, and synchronised normalisation takes E[x²]-E[x]², in float32
LOOSE = {"half precision": 2e-3, "bfloat16": 1e-2, "normalised": 2e-4}


def assert_same(name, results, expected):
    atol = LOOSE.get(name, 1e-5)
    assert results["history"].keys() == expected["history"].keys()
    assert results["epoch"] == expected["epoch"] == list(range(EPOCHS))
    for key, values in expected["history"].items():
        np.testing.assert_allclose(results["history"][key], values, atol=atol, err_msg=key)
    for a, b in zip(results["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


if __name__ == "__main__":
    strategy = ctl.make_strategy(sys.argv[1])
    results = {name: fitted(name, strategy) for name in sys.argv[2].split(",")}
    if sys.argv[3:]:
        results["agreed"] = agreed(strategy, sys.argv[3])
    print(json.dumps(results))
