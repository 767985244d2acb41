"""Detection of `tf.data` pipelines with an order that differs between processes."""

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
# name -> function that builds a dataset with a seed, or with None
RANDOM_DATASETS = {
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


def check_sharing(dataset: tf.data.Dataset) -> None:
    sharding.check_can_be_shared(dataset.batch(2), "train_data", TWO_WORKERS)


@pytest.mark.parametrize("name", RANDOM_DATASETS)
def test_an_order_without_a_seed_is_refused_on_several_workers(name):
    with pytest.raises(ctl.UsageError, match=r"without a seed.*2 workers.*Write .*seed=0"):
        check_sharing(RANDOM_DATASETS[name](None))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", RANDOM_DATASETS)
def test_an_order_with_a_seed_is_not_refused(name, seed):
    check_sharing(RANDOM_DATASETS[name](seed))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", RANDOM_DATASETS)
def test_an_order_after_set_seed_is_not_refused(name, seed):
    tf.random.set_seed(seed)
    check_sharing(RANDOM_DATASETS[name](None))


def test_random_numbers_that_choose_no_examples_are_not_refused():
    check_sharing(NUMBERS.map(lambda x: tf.random.uniform([])))


def test_a_seed_made_of_an_example_is_a_seed():
    check_sharing(NUMBERS.flat_map(lambda x: NUMBERS.shuffle(5, seed=x)))


@pytest.mark.parametrize("name", ["shuffle", "flat_map", "random", "filter"])
def test_pipelines_too_large_to_be_serialized_are_checked_too(name, monkeypatch):
    monkeypatch.setattr(dataset_traits, "_MAX_BYTES", -1)
    with pytest.raises(ctl.UsageError, match="without a seed"):
        check_sharing(RANDOM_DATASETS[name](None))
    check_sharing(RANDOM_DATASETS[name](0))


class Line(ctl.Trainer):
    """Trainer with a dataset of RANDOM_DATASETS. The trainer sets the seed before train_data."""

    dataset_name = "shuffle"

    def build(self):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def train_data(self, batch_size):
        return RANDOM_DATASETS[self.dataset_name](None).map(as_example).repeat().batch(batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.average(keras.losses.mean_squared_error(y, self.model(x)))
        self.minimize(loss, tape)
        return {"loss": loss}


def as_example(*parts):
    x = tf.reshape(tf.cast(tf.nest.flatten(parts)[-1] % 10, tf.float32), [1])
    return x, x


@pytest.mark.parametrize("name", some_of(["interleave", "sample", "random"], "interleave"))
def test_ctl_fit_names_an_order_without_a_seed_where_a_run_may_be_resumed(name, tmp_path, caplog):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for seed, number in ((None, 1), (0, 0)):
        caplog.clear()
        data = RANDOM_DATASETS[name](seed).map(as_example).batch(2)
        ctl.fit(model, data, verbose=0, model_dir=str(tmp_path / str(seed)))
        assert len([m for m in caplog.messages if "without a seed" in m]) == number


@pytest.mark.parametrize(
    "name", some_of(["shuffle", "interleave", "sample", "random"], "shuffle")
)
def test_a_trainer_sets_the_seed_before_train_data(name, tmp_path, caplog):
    """The trainer's seed makes the order reproducible: no warning, and a resumed run continues it."""
    traces = []
    for steps in ((8,), (3, 8)):
        traces.append([])
        for num_steps in steps:
            writer = ctl.MemoryWriter()
            trainer = Line(
                strategy="default", global_batch_size=2, model_dir=str(tmp_path / str(len(steps))),
                writers=[writer], intervals=every_step(),
            )  # fmt: skip
            trainer.dataset_name = name
            trainer.train(num_steps)
            traces[-1] += [values["loss"] for _, _, values in writer.rows]
    assert traces[0] == traces[1] and len(traces[0]) == 8
    assert not [m for m in caplog.messages if "seed" in m]


def nondeterministic_options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


def delay_randomly(x: tf.Tensor) -> tf.Tensor:
    """Returns the number after a random delay, so that a nondeterministic order differs between runs."""
    wait = tf.py_function(lambda: time.sleep(0.01 * random.random()) or 0, [], tf.int32)
    return x + tf.cast(wait, tf.int64)


def test_options_of_a_dataset_inside_a_function_have_no_effect():
    """TensorFlow applies only the options of the whole pipeline, so others are no reason to refuse it."""

    def build_dataset(options):
        part = tf.data.Dataset.range(40).map(delay_randomly, num_parallel_calls=8)
        return part.with_options(options)

    inside = tf.data.Dataset.range(1).flat_map(lambda x: build_dataset(nondeterministic_options()))
    outside = tf.data.Dataset.range(1).flat_map(lambda x: build_dataset(tf.data.Options()))
    assert [int(x) for x in inside] == list(range(40))
    assert [int(x) for x in outside.with_options(nondeterministic_options())] != list(range(40))
    check_sharing(inside)
    with pytest.raises(ctl.UsageError, match="its options have deterministic=False"):
        check_sharing(outside.with_options(nondeterministic_options()))
