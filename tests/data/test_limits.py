"""Training on the first batches only, and evaluations of a limited length."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import Small

EXAMPLES = np.arange(20, dtype=np.float32)


class Mean(Small):
    """A trainer that reports the mean of its examples, and of the examples of an evaluation."""

    def __init__(self, data, **options):
        super().__init__(global_batch_size=4, writers=[], **options)
        self.data, self.values = data, []

    def train_step(self, batch):
        return {"value": batch}

    def train_data(self, batch_size):
        return self.data(batch_size)

    def eval_data(self, batch_size):
        return self.data(batch_size)

    def eval_step(self, batch):
        return {"value": batch}

    def after_loop(self, step, means):
        self.values.append(means["value"])


class MeanOfWorkers(Mean):
    """The same for replica batches of each worker."""

    train_data = None

    def train_data_fn(self, input_context):
        return self.data(input_context.get_per_replica_batch_size(self.global_batch_size))


def shuffled_dataset(batch_size):
    return tf.data.Dataset.from_tensor_slices(EXAMPLES).shuffle(20).repeat().batch(batch_size)


def arrays(batch_size):
    return EXAMPLES


def finite_dataset(batch_size):
    return tf.data.Dataset.from_tensor_slices(EXAMPLES).batch(batch_size)


def batches_of_unknown_length(batch_size):
    return finite_dataset(batch_size).filter(lambda batch: True)


def train(make, steps, **options):
    trainer = make(**options, steps_per_loop=1)
    result = trainer.train(steps)
    return trainer.values, result


@pytest.mark.parametrize("strategy", some_of(["one_device", "mirrored"], "mirrored"))
@pytest.mark.parametrize(
    "data",
    [lambda n: ctl.from_arrays(EXAMPLES, n), lambda n: EXAMPLES, finite_dataset, ctl.example_numbers,
     batches_of_unknown_length],
)  # fmt: skip
def test_training_repeats_the_first_batches_in_order(data, strategy):
    options = {"num_virtual_devices": 2} if strategy == "mirrored" else {}
    values, result = train(lambda **o: Mean(data, **o), 5, overfit_batches=2, strategy=strategy, **options)
    assert values == [1.5, 5.5, 1.5, 5.5, 1.5] and result.end is ctl.RunEnd.DONE


def test_replica_batches_of_a_worker_are_repeated():
    values, _ = train(lambda **o: MeanOfWorkers(finite_dataset, **o), 5, overfit_batches=2)
    assert values == [1.5, 5.5, 1.5, 5.5, 1.5]


@pytest.mark.parametrize("data_position", some_of(["auto", "iterator"], "auto"))
def test_a_shuffled_dataset_keeps_the_batches_of_its_first_steps_also_after_a_resume(
    data_position, tmp_path
):
    def trainer(**options):
        return Mean(shuffled_dataset, overfit_batches=2, data_position=data_position, **options)

    unbroken, _ = train(trainer, 6)
    assert len(set(unbroken)) == 2 and unbroken[:2] * 3 == unbroken
    first, _ = train(trainer, 3, model_dir=str(tmp_path))
    second, _ = train(trainer, 6, model_dir=str(tmp_path))
    assert first + second == unbroken


@pytest.mark.parametrize("data", [arrays, finite_dataset])
def test_an_epoch_is_the_limited_data(data):
    trainer = Mean(data, overfit_batches=2, steps_per_loop=1)
    trainer.train(epochs=2)
    assert trainer.step == 4 and trainer.values == [1.5, 5.5, 1.5, 5.5]


@pytest.mark.parametrize("data", some_of([arrays, finite_dataset, shuffled_dataset], finite_dataset))
def test_another_number_of_batches_is_refused_at_a_resume(data, tmp_path):
    train(lambda **o: Mean(data, **o), 2, overfit_batches=2, model_dir=str(tmp_path))
    with pytest.raises(ctl.UsageError, match="overfit_batches: 2 before, 0 now"):
        train(lambda **o: Mean(data, **o), 4, model_dir=str(tmp_path))


@pytest.mark.parametrize("data", some_of([arrays, finite_dataset], arrays))
def test_intervals_in_epochs_refer_to_the_limited_data(data, tmp_path):
    intervals = ctl.Intervals(save=ctl.Every(epochs=1), steps_per_loop=1)
    trainer = Mean(data, overfit_batches=2, intervals=intervals, model_dir=str(tmp_path), keep="0")
    trainer.train(5)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*"))
    assert names == ["ckpt-2", "ckpt-4", "ckpt-5"]


def test_without_a_length_each_of_the_batches_is_used_once():
    trainer = Mean(finite_dataset, overfit_batches=2, steps_per_loop=1)
    assert trainer.train().end is ctl.RunEnd.DONE and trainer.values == [1.5, 5.5]


def test_a_batch_is_one_of_the_size_that_the_data_have():
    assert Mean(lambda n: ctl.from_arrays(EXAMPLES, 2), max_eval_batches=2).evaluate()["value"] == 1.5


SOURCES = [arrays, finite_dataset, batches_of_unknown_length]
LENGTHS = [(source, num_batches) for source in SOURCES for num_batches in (2, 5, 100, 0)]
FEW_LENGTHS = (arrays, 2), (finite_dataset, 2), (batches_of_unknown_length, 2), (finite_dataset, 100)


@pytest.mark.parametrize("case", some_of(LENGTHS, *FEW_LENGTHS))
def test_an_evaluation_ends_after_its_first_batches(case):
    data, num_batches = case
    used = EXAMPLES[: 4 * num_batches] if num_batches else EXAMPLES
    assert Mean(data, max_eval_batches=num_batches).evaluate()["value"] == np.mean(used)


def test_an_endless_evaluation_is_possible_with_a_limit():
    assert Mean(lambda n: finite_dataset(n).repeat(), max_eval_batches=10).evaluate()["value"] == 9.5


def test_training_is_not_limited_by_the_number_of_eval_batches():
    values, _ = train(lambda **o: Mean(finite_dataset, **o), 3, max_eval_batches=1)
    assert values == [1.5, 5.5, 9.5]


@pytest.mark.parametrize("name", ["overfit_batches", "max_eval_batches"])
def test_a_number_of_batches_below_0_is_refused(name):
    with pytest.raises(ctl.UsageError, match=f"{name} is -1; expected a whole number >= 0"):
        Mean(finite_dataset, **{name: -1})
