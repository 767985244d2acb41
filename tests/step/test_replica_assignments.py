"""Variables that a step assigns have the same values on one device and on two replicas, or are refused."""

from typing import ClassVar

import ctl
import keras
import pytest
import tensorflow as tf
from small_models import BATCH, FEATURES, Small

ON_READ = tf.VariableSynchronization.ON_READ
SUM, MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Assigning(Small):
    """Has a variable `state`, which `update` assigns in each step; `declared` are its arguments."""

    declared: ClassVar[dict] = {}
    start = 0.0

    def build(self):
        super().build()
        self.state = tf.Variable(self.start, trainable=False, name="state", **self.declared)

    def train_step(self, batch):
        self.update(batch[0])
        return super().train_step(batch)


def counted_rows(self, x):
    self.state.assign_add(tf.cast(tf.shape(x)[0], tf.float32))


def counted_static_rows(self, x):
    self.state.assign_add(float(x.shape[0]))


def running_mean(self, x):
    self.state.assign(0.9 * self.state + 0.1 * tf.reduce_mean(x))


def scattered(self, x):
    self.state.scatter_add(tf.IndexedSlices(tf.reduce_mean(x, axis=0)[:1], [0]))


def trainer_of(update, strategy, **members):
    kind = type("Assigning", (Assigning,), {"update": update, **members})
    return kind(strategy=strategy, writers=[])


def trained(update, strategy, **members):
    trainer = trainer_of(update, strategy, **members)
    trainer.train(3)
    return float(tf.convert_to_tensor(trainer.state.read_value()))


@pytest.mark.parametrize("update", [counted_rows, counted_static_rows, running_mean])
@pytest.mark.parametrize("gradients", [ctl.Gradients(), ctl.Gradients(accumulate_steps=2)], ids=str)
def test_a_variable_without_aggregation_is_refused_on_two_replicas(update, gradients, two_replicas):
    trainer = trainer_of(update, two_replicas)
    trainer.gradients = gradients
    with pytest.raises(ctl.UsageError, match=r"'state.*no aggregation: each of 2 replicas.*ON_READ.*SUM"):
        trainer.train(3)
    trained(update, "default")


def test_a_scattered_update_is_refused_as_well(two_replicas):
    with pytest.raises(ctl.UsageError, match="no aggregation"):
        trained(scattered, two_replicas, start=[0.0, 1.0])


def test_an_evaluation_that_assigns_is_refused_as_well(two_replicas):
    class Evaluating(Small):
        def build(self):
            super().build()
            self.rows = tf.Variable(0, trainable=False)

        def eval_step(self, batch):
            self.rows.assign_add(tf.shape(batch[0])[0])
            return super().eval_step(batch)

    with pytest.raises(ctl.UsageError, match="no aggregation"):
        Evaluating(strategy=two_replicas, writers=[]).evaluate()
    Evaluating(strategy="default", writers=[]).evaluate()


@pytest.mark.parametrize(
    ("update", "declared"),
    [
        (counted_rows, {"aggregation": SUM}),
        (counted_rows, {"aggregation": SUM, "synchronization": ON_READ}),
        (running_mean, {"aggregation": MEAN}),
        (running_mean, {"aggregation": MEAN, "synchronization": ON_READ}),
        (lambda self, x: self.state.assign_add(1.0), {"aggregation": FIRST}),
    ],
)
def test_a_declared_aggregation_gives_the_value_of_one_device(update, declared, two_replicas):
    alone = trained(update, "default", declared=declared)
    assert trained(update, two_replicas, declared=declared) == pytest.approx(alone, rel=1e-6)
    if update is counted_rows:
        assert alone == 3 * BATCH


def test_a_value_made_of_other_variables_is_equal_on_all_replicas(two_replicas):
    def average(self, x):
        self.state.assign(0.9 * self.state + 0.1 * self.model.trainable_variables[0].value)

    results = [
        trainer_of(average, strategy, start=tf.zeros([FEATURES, 16]))
        for strategy in ("default", two_replicas)
    ]
    for trainer in results:
        trainer.train(3)
    alone, both = (trainer.state.numpy() for trainer in results)
    assert abs(alone - both).max() < 1e-6 < abs(alone).max()


class Counting(keras.layers.Layer):
    """Counts its rows and keeps a running mean of its inputs."""

    def __init__(self, aggregation, **more):
        super().__init__()
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation=aggregation)

    def call(self, x):
        self.rows.assign(0.9 * self.rows + 0.1 * tf.reduce_mean(x))
        return x


def layered(aggregation, strategy):
    class Layered(Small):
        def build(self):
            super().build()
            inputs = keras.Input((FEATURES,))
            self.layer = Counting(aggregation)
            self.model = keras.Model(inputs, self.model(self.layer(inputs)))

    trainer = Layered(strategy=strategy, writers=[])
    trainer.train(3)
    return float(tf.convert_to_tensor(trainer.layer.rows.value))


def test_a_layer_with_state_of_its_own_is_refused_until_it_declares_an_aggregation(two_replicas):
    with pytest.raises(ctl.UsageError, match="no aggregation.*add_weight") as refused:
        layered("none", two_replicas)
    assert "Arguments received by" not in str(refused.value)
    assert layered("mean", two_replicas) == pytest.approx(layered("mean", "default"), rel=1e-6)


def test_a_keras_variable_that_would_add_up_totals_is_refused(two_replicas):
    class Total(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

        def call(self, x):
            self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
            return x

    class Layered(Small):
        def build(self):
            super().build()
            inputs = keras.Input((FEATURES,))
            self.model = keras.Model(inputs, self.model(Total()(inputs)))

    with pytest.raises(ctl.UsageError, match="Keras assigns the new total"):
        Layered(strategy=two_replicas, writers=[]).train(3)


@pytest.mark.parametrize("framework", ["keras3", "tf_keras", "module"])
def test_optimizers_dropout_and_synchronized_statistics_are_not_refused(framework, two_replicas):
    class Usual(Small):
        def build(self):
            super().build()
            if framework == "keras3":
                layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.5)]
                self.model = keras.Sequential([keras.Input((FEATURES,)), *layers, self.model])

    Usual(framework, "adam", strategy=two_replicas, writers=[]).train(2)
