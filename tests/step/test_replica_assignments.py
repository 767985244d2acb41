"""Variables assigned in a step: equal values on one device and on two replicas, or an error."""

from typing import ClassVar

import ctl
import keras
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import BATCH, FEATURES, Small

ON_READ = tf.VariableSynchronization.ON_READ
SUM, MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Assigning(Small):
    """A trainer that assigns a variable in each step; `declared` holds the arguments of the variable."""

    declared: ClassVar[dict] = {}
    start = 0.0

    def build(self):
        super().build()
        self.state = tf.Variable(self.start, trainable=False, name="state", **self.declared)

    def train_step(self, batch):
        self.update(batch[0])
        return super().train_step(batch)


def count_rows(self, x):
    self.state.assign_add(tf.cast(tf.shape(x)[0], tf.float32))


def count_static_rows(self, x):
    self.state.assign_add(float(x.shape[0]))


def update_running_mean(self, x):
    self.state.assign(0.9 * self.state + 0.1 * tf.reduce_mean(x))


def scatter_mean(self, x):
    self.state.scatter_add(tf.IndexedSlices(tf.reduce_mean(x, axis=0)[:1], [0]))


def trainer_of(update, strategy, **members):
    trainer_class = type("Assigning", (Assigning,), {"update": update, **members})
    return trainer_class(strategy=strategy, writers=[])


def trained(update, strategy, **members):
    trainer = trainer_of(update, strategy, **members)
    trainer.train(3)
    return float(tf.convert_to_tensor(trainer.state.read_value()))


@pytest.mark.parametrize("update", [count_rows, count_static_rows, update_running_mean])
@pytest.mark.parametrize("accumulate_steps", some_of([1, 2], 1))
def test_a_variable_without_aggregation_is_refused_on_two_replicas(update, accumulate_steps, two_replicas):
    trainer = trainer_of(update, two_replicas)
    trainer.gradients = ctl.Gradients(accumulate_steps=accumulate_steps)
    with pytest.raises(ctl.UsageError, match=r"'state.*no aggregation: each of 2 replicas.*ON_READ.*SUM"):
        trainer.train(3)
    trained(update, "default")


def test_a_scattered_update_is_refused_too(two_replicas):
    with pytest.raises(ctl.UsageError, match="no aggregation"):
        trained(scatter_mean, two_replicas, start=[0.0, 1.0])


def test_an_evaluation_that_assigns_is_refused_too(two_replicas):
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


DECLARED = {
    "sum": (count_rows, {"aggregation": SUM}),
    "sum on read": (count_rows, {"aggregation": SUM, "synchronization": ON_READ}),
    "mean": (update_running_mean, {"aggregation": MEAN}),
    "mean on read": (update_running_mean, {"aggregation": MEAN, "synchronization": ON_READ}),
    "first": (lambda self, x: self.state.assign_add(1.0), {"aggregation": FIRST}),
}


@pytest.mark.parametrize("case", some_of(DECLARED, "sum on read", "mean"))
def test_a_declared_aggregation_gives_the_value_of_one_device(case, two_replicas):
    update, declared = DECLARED[case]
    expected = trained(update, "default", declared=declared)
    assert trained(update, two_replicas, declared=declared) == pytest.approx(expected, rel=1e-6)
    if update is count_rows:
        assert expected == 3 * BATCH


def test_a_value_computed_from_other_variables_is_equal_on_all_replicas(two_replicas):
    def average(self, x):
        self.state.assign(0.9 * self.state + 0.1 * self.model.trainable_variables[0].value)

    trainers = [
        trainer_of(average, strategy, start=tf.zeros([FEATURES, 16]))
        for strategy in ("default", two_replicas)
    ]
    for trainer in trainers:
        trainer.train(3)
    expected, value = (trainer.state.numpy() for trainer in trainers)
    assert abs(expected - value).max() < 1e-6 < abs(expected).max()


class Counting(keras.layers.Layer):
    """A layer with a running mean of its inputs."""

    def __init__(self, aggregation, **options):
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


def test_a_layer_with_its_own_state_is_refused_until_it_declares_an_aggregation(two_replicas):
    with pytest.raises(ctl.UsageError, match="no aggregation.*add_weight") as raised:
        layered("none", two_replicas)
    assert "Arguments received by" not in str(raised.value)
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


@pytest.mark.parametrize("framework", some_of(["keras3", "tf_keras", "module"], "keras3"))
def test_optimizers_dropout_and_synchronized_statistics_are_not_refused(framework, two_replicas):
    class WithStandardLayers(Small):
        def build(self):
            super().build()
            if framework == "keras3":
                layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.5)]
                self.model = keras.Sequential([keras.Input((FEATURES,)), *layers, self.model])

    WithStandardLayers(framework, "adam", strategy=two_replicas, writers=[]).train(2)
