"""Settings and methods that cannot work together: an error before the first step."""

import inspect
import types

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.distribute.topology import Topology
from ctl.training import input_pipeline, resume_checks
from small_models import PlainOptimizer, Small, examples


class TwoSources(Small):
    def train_data_fn(self, context):
        return self.train_data(context)


class OwnInput(Small):
    train_data = None

    def build(self):
        super().build()
        self.gradients = ctl.Gradients(on_nonfinite="rollback")

    def train_data_fn(self, context):
        return tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(24)


class Masked(Small):
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"], mask=tf.ones_like(scores["loss"]))
        self.minimize(loss, tape)
        return scores


class Momentum(PlainOptimizer):
    apply_gradients = PlainOptimizer.apply


class SecondOptimizer(Small):
    def build(self):
        super().build()
        self.second = Momentum("adam")


class LocalMoments(Small):
    def build(self):
        super().build()
        self.model = keras.Sequential([
            keras.Input((8,)), keras.layers.BatchNormalization(name="moments"), keras.layers.Dense(4)
        ])  # fmt: skip


TWO = {"strategy": "mirrored", "num_virtual_devices": 2}
BEST = {"checkpoints": ctl.MemoryCheckpoints(keep=ctl.Keep(best="loss"))}
CASES = {
    "two sources": (TwoSources, {}, "has train_data and train_data_fn; expected one of them"),
    "no evaluations": (Small, BEST, "by 'loss' is to be kept, but there are no evaluations"),
    "mode train": (
        Small,
        {"config": ctl.Config(mode="train"), "callbacks": [ctl.EarlyStopping("loss", patience=1)]},
        "EarlyStopping requires evaluations, but there are none. --mode=train does not evaluate",
    ),
    "rollback of a worker's own data": (
        OwnInput, {"checkpoints": ctl.MemoryCheckpoints()},
        "rollback skips the data of the steps that it undoes, which train_data_fn cannot",
    ),
    "slots": (SecondOptimizer, {}, r"self\.second has no slots yet\. Call self\.second\.build\("),
    "mask in XLA": (Masked, {**TWO, "jit_compile": True}, r"adds up a count over replicas, which XLA"),
    "local moments": (
        LocalMoments, {**TWO, "strategy": "central_storage"},
        "the layer 'moments' would normalize the examples of each of 2 replicas by themselves",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_settings_that_contradict_each_other_are_refused(case):
    trainer_class, options, message = CASES[case]
    with pytest.raises(ctl.UsageError, match=message):
        trainer = trainer_class(**{"strategy": "default", "writers": [], **options})
        trainer.train(1)
    assert "trainer" not in locals() or trainer.step == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "eval", "min"), "metric is ''; expected the name"),
        (("loss", "test", "min"), "run is 'test'; expected 'train' or 'eval'"),
        (("loss", "eval", "small"), "mode is 'small'; expected 'max', 'min' or 'auto'"),
    ],
)
def test_a_metric_that_cannot_be_monitored_is_refused(arguments, message):
    metric, run, mode = arguments
    with pytest.raises(ctl.UsageError, match=message):
        ctl.EarlyStopping(metric, patience=1, run=run, mode=mode)


def test_examples_without_arrays_are_refused():
    with pytest.raises(ctl.UsageError, match="whose first example is empty"):
        ctl.from_source([{}, {}], 2)


class OneCallback(Small):
    def build(self):
        super().build()
        self.callbacks = ctl.EarlyStopping("loss")


def test_a_callback_without_a_list_in_build_is_refused():
    with pytest.raises(ctl.UsageError, match=r"callbacks is .*EarlyStopping.*; expected a list"):
        OneCallback(strategy="default", writers=[]).train(1)


class Pair(Small):
    def build(self):
        super().build()
        self.model = {"model": self.model}


class Uncallable(Small):
    """A model that is a `tf.Module` without a method `__call__`."""

    def build(self):
        self.model = tf.Module()
        self.model.weight = tf.Variable(1.0)
        self.optimizer = PlainOptimizer("sgd")


def test_a_dictionary_of_models_is_refused():
    with pytest.raises(ctl.UsageError, match=r"self\.model is a \w*; expected a Keras model"):
        Pair(strategy="default", writers=[]).train(1)


def test_predict_refuses_a_model_that_cannot_be_called():
    with pytest.raises(ctl.UsageError, match=r"predict\(\) calls self\.model, which is <.*Module"):
        Uncallable(strategy="default", writers=[]).predict(np.ones([2, 8], np.float32))


class MadeOutside(Small):
    def __init__(self, **options):
        super().__init__(**options)
        self.made_outside = keras.optimizers.SGD(0.1)

    def build(self):
        super().build()
        self.optimizer = self.made_outside


def test_an_optimizer_that_was_made_in_init_is_refused_on_two_replicas(two_replicas):
    with pytest.raises(ctl.UsageError, match=r"self\.\w+ was made outside the strategy's scope"):
        MadeOutside(strategy=two_replicas, writers=[]).train(1)
    other = tf.distribute.OneDeviceStrategy("cpu:0")
    with pytest.raises(ctl.UsageError, match=r"self\.made_outside was made outside the strategy's scope"):
        with other.scope():
            trainer = MadeOutside(strategy="one_device", writers=[])
        trainer.train(1)


def test_what_asynchronous_workers_cannot_do_is_refused(monkeypatch):
    trainer = OwnInput(strategy="default", writers=[])
    trainer.prepare()
    prepared = trainer._prepared_trainer
    monkeypatch.setattr(type(prepared.world), "is_asynchronous", True)
    with pytest.raises(ctl.UsageError, match="workers of parameter servers are asynchronous. Write trai"):
        input_pipeline.open_train_batches(prepared, 1, None)
    with pytest.raises(ctl.UsageError, match="rollback needs synchronous workers"):
        resume_checks.check_can_roll_back(prepared.world, prepared.task)


@pytest.mark.parametrize("other", [3, 4])
def test_workers_that_have_restored_different_steps_are_refused(other):
    all_reduce = types.SimpleNamespace(num_workers=2, sum=lambda values: values + np.array([0, other, 0]))
    if other == 4:
        resume_checks.check_equal_steps(all_reduce, Topology(), 4)
        return
    with pytest.raises(ctl.UsageError, match="checkpoint at step 4, worker 1 at step 3; expected the same"):
        resume_checks.check_equal_steps(all_reduce, Topology(), 4)


def test_the_attributes_of_the_class_can_be_listed():
    assert {"config", "train", "model_dir"} <= {name for name, _ in inspect.getmembers(ctl.Trainer)}
