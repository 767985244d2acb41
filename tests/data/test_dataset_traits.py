"""What is seen in a `tf.data` pipeline: orders that differ from process to process."""

import random
import time

import ctl
import keras
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.data import dataset_traits, sharding
from ctl.distribute.topology import Topology
from small_models import every_step

NUMBERS = tf.data.Dataset.range(10)
TWO_WORKERS = Topology({"worker": ("a:1", "b:1")}, num_replicas=2)
# Each makes a dataset with a seed, None for none.
DRAWN = {
    "shuffle": lambda seed: NUMBERS.shuffle(5, seed=seed),
    "shuffle once": lambda seed: NUMBERS.shuffle(5, seed=seed, reshuffle_each_iteration=False),
    "interleave": lambda seed: NUMBERS.interleave(lambda x: NUMBERS.shuffle(5, seed=seed)),
    "flat_map": lambda seed: NUMBERS.flat_map(lambda x: NUMBERS.shuffle(5, seed=seed)),
    "nested": lambda seed: NUMBERS.flat_map(
        lambda x: NUMBERS.interleave(lambda y: NUMBERS.shuffle(5, seed=seed))
    ),
    "window": lambda seed: NUMBERS.window(5).flat_map(lambda w: w.shuffle(5, seed=seed)),
    "random": lambda seed: tf.data.Dataset.random(seed=seed).take(10),
    "random each time": lambda seed: tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(10),
    "sample": lambda seed: tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS], seed=seed),
    "weighted": lambda seed: tf.data.Dataset.sample_from_datasets(
        [NUMBERS, NUMBERS], weights=[0.2, 0.8], seed=seed
    ),
    "resample": lambda seed: NUMBERS.rejection_resample(
        lambda x: tf.cast(x % 2, tf.int32), [0.2, 0.8], seed=seed
    ),
    "filter": lambda seed: NUMBERS.filter(lambda x: tf.random.uniform([], seed=seed) < 0.5),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_seed():
    tf.random.set_seed(None)


def check(dataset: tf.data.Dataset) -> None:
    sharding.check_can_be_shared(dataset.batch(2), "train_data", TWO_WORKERS)


@pytest.mark.parametrize("name", DRAWN)
def test_an_order_without_a_seed_is_refused_on_several_workers(name):
    with pytest.raises(ctl.UsageError, match=r"without a seed.*2 workers.*Write .*seed=0"):
        check(DRAWN[name](None))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", DRAWN)
def test_an_order_with_a_seed_of_its_own_is_not_refused(name, seed):
    check(DRAWN[name](seed))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", DRAWN)
def test_an_order_after_set_seed_is_not_refused(name, seed):
    tf.random.set_seed(seed)
    check(DRAWN[name](None))


def test_random_numbers_that_choose_no_examples_are_not_refused():
    check(NUMBERS.map(lambda x: tf.random.uniform([])))


def test_a_seed_made_of_an_example_is_a_seed():
    check(NUMBERS.flat_map(lambda x: NUMBERS.shuffle(5, seed=x)))


@pytest.mark.parametrize("name", ["shuffle", "flat_map", "random", "filter"])
def test_pipelines_too_large_to_be_serialized_are_looked_at_too(name, monkeypatch):
    monkeypatch.setattr(dataset_traits, "_MAX_BYTES", -1)
    with pytest.raises(ctl.UsageError, match="without a seed"):
        check(DRAWN[name](None))
    check(DRAWN[name](0))


class Line(ctl.Trainer):
    """A dataset of DRAWN, made in train_data, where the Trainer has set the seed."""

    drawn = "shuffle"

    def build(self):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def train_data(self, batch_size):
        return DRAWN[self.drawn](None).map(as_example).repeat().batch(batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.average(keras.losses.mean_squared_error(y, self.model(x)))
        self.minimize(loss, tape)
        return {"loss": loss}


def as_example(*parts):
    x = tf.reshape(tf.cast(tf.nest.flatten(parts)[-1] % 10, tf.float32), [1])
    return x, x


@pytest.mark.parametrize("name", ["interleave", "sample", "random"])
def test_ctl_fit_names_an_order_without_a_seed_where_a_run_may_be_resumed(name, tmp_path, caplog):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for seed, number in ((None, 1), (0, 0)):
        caplog.clear()
        data = DRAWN[name](seed).map(as_example).batch(2)
        ctl.fit(model, data, verbose=0, model_dir=str(tmp_path / str(seed)))
        assert len([m for m in caplog.messages if "without a seed" in m]) == number


@pytest.mark.parametrize(
    "name", some_of(["shuffle", "interleave", "sample", "random"], "shuffle", "random")
)
def test_a_trainer_sets_the_seed_before_train_data(name, tmp_path, caplog):
    """The Trainer's seed makes an order without one repeat: nothing is said, and a resume goes on."""
    traces = []
    for steps in ((8,), (3, 8)):
        traces.append([])
        for to in steps:
            writer = ctl.MemoryWriter()
            trainer = Line(
                strategy="default", global_batch_size=2, model_dir=str(tmp_path / str(len(steps))),
                writers=[writer], intervals=every_step(),
            )  # fmt: skip
            trainer.drawn = name
            trainer.train(to)
            traces[-1] += [values["loss"] for _, _, values in writer.rows]
    assert traces[0] == traces[1] and len(traces[0]) == 8
    assert not [m for m in caplog.messages if "seed" in m]


def in_any_order() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


def late(x: tf.Tensor) -> tf.Tensor:
    """The same number, after a time that differs: in any order, no two of 40 runs are alike."""
    wait = tf.py_function(lambda: time.sleep(0.01 * random.random()) or 0, [], tf.int32)
    return x + tf.cast(wait, tf.int64)


def test_options_of_a_dataset_that_a_function_makes_do_nothing():
    """TensorFlow applies only those of the whole pipeline, so they are no reason to refuse it."""

    def made(options):
        part = tf.data.Dataset.range(40).map(late, num_parallel_calls=8)
        return part.with_options(options)

    inside = tf.data.Dataset.range(1).flat_map(lambda x: made(in_any_order()))
    outside = tf.data.Dataset.range(1).flat_map(lambda x: made(tf.data.Options()))
    assert [int(x) for x in inside] == list(range(40))
    assert [int(x) for x in outside.with_options(in_any_order())] != list(range(40))
    check(inside)
    with pytest.raises(ctl.UsageError, match="its options have deterministic=False"):
        check(outside.with_options(in_any_order()))
