"""Batches of Python code as training data: PyDatasets, generators, Grain pipelines, frames and matrices."""

import collections
import importlib.util

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints import commit
from ctl.data import grain_batches
from ctl.data.grain_batches import GrainBatches
from small_models import every_step

NUM_EXAMPLES, SIZE = 37, 8  # 5 batches, the last one with 5 rows
NUM_BATCHES = 5


def batch_of(index):
    """Returns batch `index`: rows of three equal values, and the numbers of its examples."""
    numbers = np.arange(index * SIZE, min(NUM_EXAMPLES, (index + 1) * SIZE))
    return np.repeat(numbers[:, np.newaxis], 3, axis=1).astype(np.float32), numbers


class Batches(keras.utils.PyDataset):
    """Records the calls. With `endless`, batches repeat in order."""

    def __init__(self, calls, endless=False):
        super().__init__()
        self.calls, self.endless = calls, endless

    @property
    def num_batches(self):
        return None if self.endless else NUM_BATCHES

    def __getitem__(self, index):
        self.calls.append(index)
        return list(batch_of(index % NUM_BATCHES))

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Recording(ctl.Trainer):
    """Records the numbers of the examples of each step. Stops after step `stop_at`."""

    def __init__(self, make_data, *, stop_at=None, **options):
        options = {"global_batch_size": SIZE, "writers": [], "strategy": "default", **options}
        intervals = every_step(log=ctl.Every(), save=ctl.Every(steps=1), steps_per_loop=1)
        super().__init__(intervals=intervals, **options)
        self._make_data, self._steps, self._stop_at = make_data, [], stop_at

    def build(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(1e-6)

    def train_data(self, batch_size):
        return self._make_data()

    eval_data = train_data

    def after_loop(self, step, means):
        return step == self._stop_at

    def record(self, numbers):
        self._steps.append(numbers.tolist())

    def train_step(self, batch):
        x, numbers = batch
        tf.numpy_function(self.record, [numbers], [])
        with tf.GradientTape() as tape:
            loss = self.average(self.model(x)[:, 0])
        self.minimize(loss, tape)
        return {"number": numbers}

    def eval_step(self, batch):
        return {"number": batch[1]}


def trained(make_data, *, steps=None, epochs=None, **options):
    """Trains, and returns the numbers of the examples by step."""
    trainer = Recording(make_data, **options)
    trainer.train(steps, epochs=epochs)
    return trainer._steps


def newest_manifest(model_dir):
    directory = model_dir / "checkpoints"
    step = max(ctl.ChiefOnlyCheckpoints(str(directory)).steps())
    return commit.read_manifest(directory / f"ckpt-{step}")


def generator():
    return map(batch_of, range(NUM_BATCHES))


class ExampleSource:
    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        return np.full(3, index, np.float32), np.int64(index)

    def __repr__(self):  # Grain compares it when it restores a position
        return "ExampleSource()"


def needs_library(name):
    """Decorates a test of the second tier, which has the libraries of the extra `slow`."""
    is_missing = importlib.util.find_spec(name) is None
    return lambda test: pytest.mark.slow(pytest.mark.skipif(is_missing, reason=f"needs {name}")(test))


def grain_dataset():
    import grain

    return grain.MapDataset.source(ExampleSource()).seed(3).shuffle().to_iter_dataset().batch(SIZE)


def grain_loader():
    from grain import python as grain

    sampler = grain.IndexSampler(num_records=NUM_EXAMPLES, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(
        data_source=ExampleSource(), sampler=sampler, operations=[grain.Batch(SIZE)], worker_count=0
    )


SOURCES = {
    "generator": generator,
    "py dataset": lambda: Batches([]),
    "grain dataset": grain_dataset,
    "grain loader": grain_loader,
}
GRAIN_MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="needs grain"),
]
CASES = [pytest.param(name, marks=GRAIN_MARKS if "grain" in name else ()) for name in SOURCES]
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("name", CASES)
def test_a_pass_has_every_example_once_and_then_ends(name):
    steps = trained(SOURCES[name], steps=100)
    assert len(steps) == NUM_BATCHES and sorted(sum(steps, [])) == list(range(NUM_EXAMPLES))


@pytest.mark.parametrize("name", CASES)
def test_each_epoch_is_a_pass(name):
    steps = trained(SOURCES[name], epochs=3)
    assert len(steps) == 3 * NUM_BATCHES
    for first in range(0, len(steps), NUM_BATCHES):
        assert sorted(sum(steps[first : first + NUM_BATCHES], [])) == list(range(NUM_EXAMPLES))


@pytest.mark.parametrize("epochs", some_of([1, 3], 3))
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_continues_with_the_next_batch(name, epochs, tmp_path, caplog):
    unbroken = trained(SOURCES[name], epochs=epochs)
    end = NUM_BATCHES * (epochs - 1) + 2  # within the last pass
    interrupted = Recording(SOURCES[name], stop_at=end, model_dir=tmp_path / "b")
    interrupted.train(epochs=epochs)
    if "grain" in name:
        assert newest_manifest(tmp_path / "b").data["iterator"]["batches"] == end
    caplog.clear()
    resumed = trained(SOURCES[name], epochs=epochs, model_dir=tmp_path / "b")
    assert interrupted._steps + resumed == unbroken
    assert ("repeat its results" in caplog.text) == (name == "generator")


def test_a_resumed_run_calls_the_hooks_of_earlier_passes(tmp_path):
    class Reordered(Batches):
        """Changes the order of its batches after each pass."""

        def __init__(self):
            super().__init__([])
            self.order, self.generator = np.arange(NUM_BATCHES), np.random.default_rng(1)

        def __getitem__(self, index):
            return batch_of(self.order[index])

        def on_epoch_end(self):
            self.generator.shuffle(self.order)

    unbroken = trained(Reordered, epochs=3)
    assert unbroken[:NUM_BATCHES] != unbroken[NUM_BATCHES : 2 * NUM_BATCHES]
    Recording(Reordered, stop_at=12, model_dir=tmp_path).train(epochs=3)
    assert trained(Reordered, epochs=3, model_dir=tmp_path) == unbroken[12:]


def test_a_resumed_run_reads_no_batch_of_a_py_dataset_again(tmp_path):
    Recording(lambda: Batches([]), model_dir=tmp_path, stop_at=3).train(epochs=1)
    calls = []
    resumed = trained(lambda: Batches(calls), epochs=1, model_dir=tmp_path)
    assert calls[:4] == [0, 1, "end", "begin"]  # two batches for their shapes
    assert len(calls) == 4 + len(resumed) + 1 == 7


@needs_library("grain")
def test_a_restored_position_of_grain_reads_no_example_before_it(monkeypatch):
    import grain

    monkeypatch.setattr(grain_batches, "_MOST_STATES", 50)

    reads = []

    class Recorded(ExampleSource):
        def __len__(self):
            return 3000

        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    def opened():
        return GrainBatches(grain.MapDataset.source(Recorded()).to_iter_dataset().batch(SIZE), "data")

    first = opened()
    *_, expected = first.dataset.take(201)
    state = first.state_at(200)
    assert first.state_at(150) is None  # the newest states are kept
    reads.clear()
    second = opened()
    assert second.start_at(0, 200, state)
    assert next(iter(second.dataset))[1].numpy().tolist() == expected[1].numpy().tolist()
    assert not {index for index in reads if 1000 <= index < 1600}  # Grain reads up to 500 ahead of 0
    assert second.state_at(201) == first.state_at(201)


@pytest.mark.parametrize(
    "name", [pytest.param(*c.values, marks=[*c.marks, *SLOW * (c.values != ("generator",))]) for c in CASES]
)
def test_data_position_skip_reads_the_batches_again(name, tmp_path):
    Recording(SOURCES[name], model_dir=tmp_path, stop_at=3).train(epochs=2)
    resumed = trained(SOURCES[name], epochs=2, model_dir=tmp_path, data_position="skip")
    assert resumed == trained(SOURCES[name], epochs=2)[3:]


def test_data_position_indexed_is_the_mode_of_a_py_dataset_and_not_of_a_generator(tmp_path):
    Recording(lambda: Batches([]), model_dir=tmp_path, stop_at=3).train(epochs=2)
    resumed = trained(lambda: Batches([]), epochs=2, model_dir=tmp_path, data_position="indexed")
    assert resumed == trained(lambda: Batches([]), epochs=2)[3:]
    with pytest.raises(ctl.UsageError, match="data_position is 'indexed', and train_data returns batches"):
        trained(generator, epochs=1, data_position="indexed")


@needs_library("grain")
def test_a_position_that_grain_refuses_is_reached_by_reading(tmp_path, caplog):
    Recording(grain_loader, model_dir=tmp_path, stop_at=3).train(epochs=1)

    def other_loader():
        loader = grain_loader()
        loader._data_source = type("Renamed", (ExampleSource,), {"__repr__": lambda self: "Renamed()"})()
        return loader

    resumed = trained(other_loader, epochs=1, model_dir=tmp_path)
    assert "Grain cannot continue at the saved position" in caplog.text
    assert resumed == trained(grain_loader, epochs=1)[3:]


@needs_library("grain")
@pytest.mark.parametrize("options", [{}, {"data_position": "skip"}])
def test_a_position_of_grain_is_refused_for_a_generator(options, tmp_path):
    Recording(grain_dataset, model_dir=tmp_path, stop_at=3).train(epochs=1)
    with pytest.raises(ctl.UsageError, match="a state of Grain's iterator before, skip now"):
        trained(generator, epochs=1, model_dir=tmp_path, **options)
    assert trained(grain_dataset, epochs=1, model_dir=tmp_path, **options)


def test_hooks_of_a_py_dataset_are_called_around_each_pass():
    calls = []
    trained(lambda: Batches(calls), epochs=2)
    hooks = [call for call in calls if isinstance(call, str)]
    assert hooks[:5] == ["end", "begin", "end", "begin", "end"]


def test_a_py_dataset_is_shuffled_for_training_and_not_for_evaluation():
    first, second = trained(lambda: Batches([]), epochs=1), trained(lambda: Batches([]), epochs=1, seed=1)
    assert first != second and sorted(first) == sorted(second)
    trainer = Recording(lambda: Batches([]))
    assert trainer.evaluate()["number"] == (NUM_EXAMPLES - 1) / 2


def test_an_endless_py_dataset_ends_with_the_steps():
    steps = trained(lambda: Batches([], endless=True), steps=7)
    assert steps == [batch_of(i % NUM_BATCHES)[1].tolist() for i in range(7)]


def test_a_pass_over_the_same_generator_is_refused():
    first = generator()
    with pytest.raises(ctl.UsageError, match="has to return a new generator in each call.*the same one"):
        trained(lambda: first, epochs=2)


def test_an_empty_generator_is_one_clear_error():
    with pytest.raises(ctl.UsageError, match="train_data yields no batch; expected at least one"):
        trained(lambda: iter([]), steps=2)


def frames():
    import pandas

    x, numbers = (np.concatenate(parts) for parts in zip(*map(batch_of, range(NUM_BATCHES)), strict=True))
    return pandas.DataFrame(x.astype(np.float64), columns=list("abc")), pandas.Series(numbers)


@needs_library("pandas")
def test_frames_are_arrays():
    x, numbers = frames()
    arrays = x.to_numpy(), numbers.to_numpy()
    assert trained(lambda: (x, numbers), steps=5) == trained(lambda: arrays, steps=5)
    (batch,) = ctl.from_arrays({"x": x, **dict(x)}, NUM_EXAMPLES).replica_batches(
        seed=0, start=0, total=NUM_EXAMPLES, replicas=range(1), num_replicas=1
    )
    assert batch["x"].shape == (NUM_EXAMPLES, 3) and batch["a"].shape == (NUM_EXAMPLES,)
    assert batch["x"].dtype == batch["a"].dtype == tf.float32


@needs_library("pandas")
def test_columns_without_a_common_array_are_one_clear_error():
    x, numbers = frames()
    x["city"] = "Bonn"
    with pytest.raises(ctl.UsageError, match=r"columns of other types \(city\).*dict\(frame\)"):
        ctl.from_arrays((x, numbers), 4)
    x["city"] = numbers.astype("Int64").where(numbers > 3)
    with pytest.raises(ctl.UsageError, match="column city of a DataFrame has missing values.*fillna"):
        ctl.from_arrays(x[["city"]], 4)
    assert ctl.from_arrays(dict(frames()[0].assign(city="Bonn")), 4).num_examples == NUM_EXAMPLES


@needs_library("pandas")
def test_a_frame_with_columns_of_equal_names_is_an_array_and_one_without_columns_is_refused():
    x, _ = frames()
    x.columns = ["a", "b", "a"]
    first = ctl.from_arrays(x, 4).read_first(2)
    np.testing.assert_array_equal(first, x.to_numpy(np.float32)[:2])
    with pytest.raises(ctl.UsageError, match="a DataFrame has no columns; expected at least one"):
        ctl.from_arrays(x.iloc[:, :0], 4)


@needs_library("pandas")
@pytest.mark.parametrize(("name", "message"), [
    ("date", r"column date of a DataFrame has values of datetime64.*frame\['date'\].astype\('int64'\)"),
    ("city", r"column city of a DataFrame has missing values in a column of text.*fillna"),
    ("any", r"column any of a DataFrame has values of object; expected numbers or text"),
    (None, r"a Series has missing values in a column of text. Write series.fillna"),
])  # fmt: skip
def test_a_column_of_dates_objects_or_text_with_missing_values_is_named(name, message):
    import pandas

    values = {"date": pandas.date_range("2020", periods=2), "any": [[1], [1, 2]]}.get(name, ["Bonn", None])
    column = pandas.Series(values, name=name)
    with pytest.raises(ctl.UsageError, match=message):
        ctl.from_arrays({"column": column, "number": np.arange(2)}, 2)


def test_a_dictionary_with_defaults_is_a_dictionary_of_arrays():
    arrays = collections.defaultdict(list, {"a": np.arange(4)})
    assert ctl.from_arrays(arrays, 2).read_first(2)["a"].numpy().tolist() == [0, 1]


def sparse_matrix():
    dense = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
    return np.where(dense > 0, dense, 0)


@pytest.mark.parametrize("kind", ["tensor", "ragged", pytest.param("matrix", marks=pytest.mark.slow)])
def test_rows_of_sparse_and_ragged_arrays_are_those_of_dense_arrays(kind, two_replicas):
    dense = sparse_matrix()
    if kind == "ragged":
        rows = tf.RaggedTensor.from_tensor(dense)
    elif kind == "matrix":
        rows = pytest.importorskip("scipy.sparse").csr_matrix(dense)
    else:
        rows = tf.sparse.from_dense(dense)
    numbers = np.arange(NUM_EXAMPLES)

    class Composite(Recording):
        def train_step(self, batch):
            x = batch[0]
            x = x.to_tensor(shape=[None, 3]) if kind == "ragged" else tf.sparse.to_dense(x)
            return super().train_step((tf.reshape(x, [-1, 3]), batch[1]))

    def weights(arrays, strategy):
        trainer = Composite(lambda: arrays, strategy=strategy)
        trainer.train(epochs=2)
        return trainer.model.get_weights(), trainer._steps

    expected, steps = weights((rows, numbers), "default")
    assert steps == trained(lambda: (dense, numbers), epochs=2)
    on_replicas, _ = weights((rows, numbers), two_replicas)
    np.testing.assert_allclose(on_replicas[0], expected[0], atol=1e-6)
