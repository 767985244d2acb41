"""Batches of Python code that do not fit together, and other data that are refused or read again."""

import concurrent.futures

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.data import dataset_traits, python_batches, random_access, resume_position


class Given(keras.utils.PyDataset):
    """Returns the given batches; an exception among them is raised."""

    def __init__(self, batches, length="known"):
        super().__init__()
        self.batches, self.length = batches, length

    @property
    def num_batches(self):
        return len(self.batches) if self.length == "known" else None

    def __getitem__(self, index):
        batch = self.batches[index % len(self.batches)]
        if isinstance(batch, Exception):
            raise batch
        return batch


def filled(*shape):
    return np.ones(shape, np.float32)


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_batch_of_another_size_is_refused_by_a_source_of_examples():
    source = ctl.from_source(Given([filled(4, 3), filled(2, 3), filled(4, 3)]), 4)
    with pytest.raises(ctl.UsageError, match="batch 1 of a Given has 2 rows; expected 4 as in batch 0"):
        source.read_first(6)


def test_a_batch_that_could_not_be_read_is_read_again():
    data = Given([filled(2, 3), OSError("not yet"), filled(2, 3)])
    rows = python_batches.RowsOfPyDataset(data, num_kept=2)
    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            rows[2]
    data.batches[1] = 2 * filled(2, 3)
    np.testing.assert_array_equal(rows[2], [2, 2, 2])


def test_validation_data_without_a_length_need_a_number_of_steps():
    batches, model = Given([(filled(4, 3), filled(4, 1))] * 3, "unknown"), compiled()
    with pytest.raises(ctl.UsageError, match="the validation data, a Given, have no length; give val"):
        ctl.fit(model, filled(8, 3), filled(8, 1), validation_data=batches, verbose=0)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps", [2, 5])
def test_validation_steps_limit_a_py_dataset(steps):
    batches = Given([(filled(4, 3), i * filled(4, 1)) for i in (1, 1, 9)])
    histories = [
        fit(compiled_with_zeros(), filled(8, 3), filled(8, 1), verbose=0, validation_data=batches,
            validation_steps=steps).history
        for fit in (keras.Model.fit, ctl.fit)
    ]  # fmt: skip
    assert histories[0]["val_loss"] == pytest.approx(histories[1]["val_loss"], rel=1e-5)


def compiled_with_zeros():
    model = compiled()
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    return model


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            [(filled(4, 3), filled(4, 1)), (filled(4, 3, 1), filled(4, 1))],
            "expected the same number of axes",
        ),
        ([((filled(4, 3), filled(4, 3)),)] * 2, "a tuple of inputs without targets; expected a dictionary"),
    ],
)
def test_batches_of_another_structure_are_refused(batches, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.fit(compiled(), Given(batches), verbose=0)


def test_ragged_batches_are_read():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    dataset = python_batches.training_batches(Given([(ragged, filled(2, 1))]), epochs=1, steps=1, seed=None)
    x, _ = next(iter(dataset))
    assert isinstance(x, tf.RaggedTensor) and x.to_list() == [[1.0], [2.0, 3.0]]


def test_the_caller_reads_examples_if_the_threads_have_ended(monkeypatch):
    ended = concurrent.futures.ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(random_access, "_thread_pool", lambda *arguments: ended)
    source = ctl.from_source([(np.float32(i), np.int64(i)) for i in range(6)], 3, num_threads=2)
    assert source.read_first(6)[1].numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_iterator_of_data_that_each_worker_reads_is_not_saved():
    with pytest.raises(ctl.UsageError, match=r"ctl\.shard gives each worker separate data\. Write data"):
        resume_position.check_mode("iterator", is_indexed=False, is_per_worker=True)


def test_a_pipeline_whose_operations_cannot_be_read_has_no_known_traits(monkeypatch):
    def fail(*arguments):
        raise tf.errors.UnimplementedError(None, None, "not supported")

    for name in ("serialized_graph", "_nodes_of_objects"):
        monkeypatch.setattr(dataset_traits, name, fail)
    traits = dataset_traits.Traits(tf.data.Dataset.range(4).map(lambda x: tf.random.normal([])))
    assert not traits.operations and not traits.has_parallel_state


def test_a_loader_of_torch_is_read_as_batches():
    class DataLoader:
        """A class with the name and the module of the loader of PyTorch."""

        def __iter__(self):
            return iter([(filled(4, 3), filled(4, 1))] * 2)

    DataLoader.__module__ = "torch.utils.data.dataloader"
    history = ctl.fit(compiled(), DataLoader(), verbose=0)
    assert len(history.epoch) == 1
