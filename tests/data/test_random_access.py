"""Examples of random-access sources: order, shares, positions, threads and errors."""

import threading
import time
from typing import NamedTuple

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small, digest, every_step, examples

NUM_EXAMPLES = 37


class Numbers:
    """Example i is (a row of three values i, the number i)."""

    def __init__(self, num_examples=NUM_EXAMPLES):
        self.num_examples = num_examples

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        return np.full(3, index, np.float32), index


class Batches(keras.utils.PyDataset):
    def __init__(self, num_examples=NUM_EXAMPLES, size=8):
        super().__init__()
        self.numbers = np.arange(num_examples)
        self.size = size
        self.reads = []

    def __len__(self):
        return (len(self.numbers) + self.size - 1) // self.size

    def __getitem__(self, index):
        self.reads.append(index)
        numbers = self.numbers[index * self.size : (index + 1) * self.size]
        return numbers[:, np.newaxis].astype("float32"), numbers


def dataset(data, *, start=0, total=None, replicas=range(1), num_replicas=1):
    return data.replica_batches(
        seed=3, start=start, total=total, replicas=replicas, num_replicas=num_replicas
    )


def numbers(data, steps, **options):
    """Returns the second component of each batch, which is the numbers of the examples."""
    return [batch[1].tolist() for batch in dataset(data, **options).take(steps).as_numpy_iterator()]


def test_a_source_has_the_order_of_the_same_arrays():
    arrays = np.arange(NUM_EXAMPLES, dtype=np.int64)
    in_memory = ctl.from_arrays((np.repeat(arrays[:, None], 3, 1).astype("float32"), arrays), 8)
    from_source = ctl.from_source(Numbers(), 8)
    assert numbers(from_source, 10) == numbers(in_memory, 10)
    assert from_source.steps_per_epoch == in_memory.steps_per_epoch == NUM_EXAMPLES / 8
    x, y = next(dataset(from_source).as_numpy_iterator())
    assert x.shape == (8, 3) and x.dtype == np.float32 and y.dtype == np.int64
    assert x[:, 0].tolist() == y.tolist()


def test_each_replica_reads_its_own_examples_only():
    reads = []

    class Recorded(Numbers):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    data = ctl.from_source(Recorded(), 8)
    global_batches = numbers(data, 4)
    reads.clear()
    second = numbers(data, 4, replicas=range(1, 2), num_replicas=2)
    assert second == [batch[4:] for batch in global_batches]
    assert set(sum(second, [])) <= set(reads) and not set(global_batches[0][:4]) & set(reads[:4])


@pytest.mark.parametrize("start", [1, 3, 12])
def test_a_start_at_any_position_reads_no_earlier_example(start):
    data = ctl.from_source(Numbers(), 8)
    expected = numbers(data, 16)[start:]
    assert numbers(data, 16 - start, start=start * 8) == expected


def test_examples_are_read_in_several_threads_at_the_same_time():
    barrier = threading.Barrier(4, timeout=60)

    class Waiting(Numbers):
        def __getitem__(self, index):
            if 8 <= index < 24:  # not example 0, read once more for its shape, nor examples read ahead
                barrier.wait()
            return super().__getitem__(index)

    data = ctl.from_source(Waiting(), 8, shuffle=False, num_threads=4)
    assert numbers(data, 2, start=8) == [list(range(8, 16)), list(range(16, 24))]


def test_one_thread_never_reads_two_examples_at_the_same_time():
    lock = threading.Lock()

    class Exclusive(Numbers):
        def __getitem__(self, index):
            assert lock.acquire(blocking=False)
            try:
                return super().__getitem__(index)
            finally:
                lock.release()

    data = ctl.from_source(Exclusive(500), 8, num_threads=1)
    assert len(numbers(data, 60)) == 60


class Pair(NamedTuple):
    name: str
    value: float


class Wrapped:
    """A source of the given elements, read one at a time."""

    def __init__(self, elements):
        self.elements = elements

    def __len__(self):
        return len(self.elements)

    def __getitem__(self, index):
        return self.elements[index]


TEXT = tf.TensorSpec([4], tf.string)


@pytest.mark.parametrize(
    "element,expected",
    [
        (2.5, tf.TensorSpec([4], tf.float32)),
        (np.float64(2.5), tf.TensorSpec([4], tf.float64)),
        ([1, 2, 3], tf.TensorSpec([4, 3], tf.int64)),
        ([1.5, 2], tf.TensorSpec([4, 2], tf.float32)),
        ([np.zeros(2), 1], (tf.TensorSpec([4, 2], tf.float64), tf.TensorSpec([4], tf.int64))),
        ({"text": "café", "bytes": b"\x00a\x00"}, dict.fromkeys(("text", "bytes"), TEXT)),
        (Pair("a", 1.0), Pair(TEXT, tf.TensorSpec([4], tf.float32))),
        (tf.constant([True]), tf.TensorSpec([4, 1], tf.bool)),
        (np.array(["a", "b"]), tf.TensorSpec([4, 2], tf.string)),
    ],
    ids=str,
)  # fmt: skip
def test_examples_become_tensors(element, expected):
    data = dataset(ctl.from_source(Wrapped([element] * 4), 4), total=4)
    assert data.element_spec == expected
    (batch,) = data
    if isinstance(element, dict):
        assert batch["text"][0].numpy().decode() == "café" and batch["bytes"][0].numpy() == b"\x00a\x00"


def test_a_transform_gets_one_example_and_map_gets_batches():
    data = ctl.from_source(range(10), 5, shuffle=False, transform=lambda i: (i, f"file {i}"))
    data = data.map(lambda number, name: {"number": number * 2, "name": name})
    batch = next(iter(dataset(data)))
    assert batch["number"].numpy().tolist() == [0, 2, 4, 6, 8]
    assert batch["name"][1].numpy() == b"file 1"


def test_rows_of_a_py_dataset_are_examples_and_its_batches_are_shuffled():
    source = Batches()
    data = ctl.from_source(source, 8)
    epoch = numbers(data, 5, total=NUM_EXAMPLES)
    assert sorted(sum(epoch, [])) == list(range(NUM_EXAMPLES))
    assert epoch[-1] == list(range(32, 37))  # a short batch stays at the end
    assert [batch[0] for batch in epoch] != [0, 8, 16, 24, 32]
    assert all(batch == list(range(batch[0], batch[-1] + 1)) for batch in epoch)
    first, second = (numbers(data, 4, replicas=range(r, r + 1), num_replicas=2) for r in (0, 1))
    assert [a + b for a, b in zip(first, second, strict=True)] == epoch[:4]


def test_a_py_dataset_may_be_read_in_batches_of_another_size():
    source = Batches()
    data = ctl.from_source(source, 5, shuffle=False)
    source.reads.clear()
    assert sum(numbers(data, 8, total=NUM_EXAMPLES), []) == list(range(NUM_EXAMPLES))
    assert len(source.reads) <= 5  # the rows of a batch share one read


@pytest.mark.parametrize("batch_size", [8, 256])
def test_threads_read_each_batch_of_a_py_dataset_about_once(batch_size):
    class Slow(Batches):
        def __getitem__(self, index):
            time.sleep(0.002)  # another thread runs
            return super().__getitem__(index)

    source = Slow(num_examples=1024, size=8)
    data = ctl.from_source(source, batch_size)
    source.reads.clear()
    numbers(data, 1024 // batch_size, total=1024)
    is_complete = {0, 127, *source.reads} == set(range(128))  # first and last are read at the start
    assert is_complete and len(source.reads) < 2 * 128


def test_a_py_dataset_may_define_its_length_as_the_number_of_batches():
    class Counted(keras.utils.PyDataset):
        num_batches = 3

        def __getitem__(self, index):
            return np.full([2, 1], index), np.arange(2 * index, 2 * index + 2)

    data = ctl.from_source(Counted(), 4, shuffle=False)
    assert numbers(data, 2, total=6) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.slow
def test_a_grain_map_dataset_gets_the_epoch_unless_its_examples_are_limited():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(Numbers()).seed(1).shuffle()
    data = ctl.from_source(source, NUM_EXAMPLES, shuffle=False)
    first, second = numbers(data, 2)
    assert first != second and sorted(first) == sorted(second) == list(range(NUM_EXAMPLES))
    assert numbers(data, 1, total=NUM_EXAMPLES) == [first]
    random = source.random_map(lambda x, generator: (x[0], generator.integers(1 << 40)))
    shuffled = numbers(ctl.from_source(random, NUM_EXAMPLES), 2)
    assert set(shuffled[0]).isdisjoint(shuffled[1])
    limited = ctl.from_source(source, 8, shuffle=False).first_examples(8)
    first, second = numbers(limited, 2)
    assert first == second


def test_training_from_a_source_equals_training_from_arrays():
    def trained(make_data):
        class Trained(Small):
            def train_data(self, batch_size):
                return make_data(batch_size)

        trainer = Trained(writers=[], intervals=every_step(log=ctl.Every()))
        trainer.train(6)
        return digest(trainer)

    pairs = Wrapped(list(zip(*examples(), strict=True)))
    assert trained(lambda size: ctl.from_source(pairs, size)) == trained(
        lambda size: ctl.from_arrays(examples(), size)
    )


def test_evaluation_of_a_source_uses_each_example_once():
    class Evaluated(Small):
        def eval_data(self, batch_size):
            return ctl.from_source(Numbers(NUM_EXAMPLES), batch_size)

        def eval_step(self, batch):
            return {"number": batch[1]}

    trainer = Evaluated(writers=[], intervals=every_step(log=ctl.Every()))
    assert trainer.evaluate()["number"] == sum(range(NUM_EXAMPLES)) / NUM_EXAMPLES


REFUSED = {
    "no length": (iter([]), {}, "got a list_iterator; expected an object with __len__ and __getitem__"),
    "a dictionary": ({"a": 1}, {}, "got a dict; expected an object"),
    "no examples": ([], {}, "list of length 0; expected at least one example"),
    "no threads": (range(3), dict(num_threads=0), "num_threads is 0; expected a whole number >= 1"),
    "a batch of zero": (range(3), dict(batch_size=0), "batch_size is 0; expected a whole number >= 1"),
    "an object": (Wrapped([object()]), {}, "an example with a object.*transform"),
    "an endless source": (range(2**60), {}, "repeats itself without end.*Remove repeat"),
    "an endless PyDataset": (
        type("Endless", (Batches,), {"num_batches": None})(), {}, "without a length.*train_data"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_invalid_source_is_one_clear_error(name):
    source, options, message = REFUSED[name]
    with pytest.raises(ctl.UsageError, match=message):
        ctl.from_source(source, **{"batch_size": 4, **options})


@pytest.mark.parametrize(
    "element,message",
    [
        (np.zeros(4, np.float32), r"example 9 has an array of float32 \(4,\); expected float32 \(3,\)"),
        (np.zeros(3, np.complex64), "example 9 has an array of complex64"),
        ((np.zeros(3), 1), "example 9 of a Wrapped has the structure"),
    ],
)
def test_an_unequal_example_ends_the_run_with_its_number(element, message):
    source = Wrapped([*[np.zeros(3, np.float32)] * 9, element, *[np.zeros(3, np.float32)] * 6])

    class Unequal(Small):
        def train_data(self, batch_size):
            return ctl.from_source(source, batch_size, shuffle=False)

        def train_step(self, batch):
            return {"loss": tf.reduce_sum(batch, 1)}

    with pytest.raises(ctl.UsageError, match=message):
        Unequal(writers=[], intervals=every_step(log=ctl.Every())).train(4)


def test_a_prediction_names_an_unequal_example():
    source = Wrapped([*[np.zeros(8, np.float32)] * 9, np.zeros(4, np.float32)])
    trainer = Small(writers=[])
    with pytest.raises(ctl.UsageError, match=r"predict's data .*example 9 has an array of float32 \(4,\)"):
        trainer.predict(ctl.from_source(source, 4))


@pytest.mark.parametrize(
    "first,second,message",
    [
        (np.int32(1), np.int64(2**40), "an array of int64 .*; expected int32"),
        (np.int8(1), np.uint8(200), "an array of uint8 .*; expected int8"),
        (np.float16(1), np.float64(1e6), "an array of float64 .*; expected float16"),
    ],
)
def test_a_number_that_the_dtype_of_example_0_cannot_hold_is_refused(first, second, message):
    with pytest.raises(ctl.UsageError, match=f"example 1 has {message}"):
        ctl.from_source([first, second], 2).read_first(2)


def test_infinity_and_nan_may_be_cast_and_finite_floats_are_rounded():
    values = [np.float16(1), np.float64(0.1), np.float64("inf"), np.float64("nan")]
    read = ctl.from_source(values, 4).read_first(4).numpy()
    assert read.dtype == np.float16 and np.isinf(read[2]) and np.isnan(read[3])


def test_arrays_of_bfloat16_are_examples():
    dtype = tf.bfloat16.as_numpy_dtype
    source = [np.full(3, index, dtype) for index in range(8)]
    (batch,) = dataset(ctl.from_source(source, 4, shuffle=False)).take(1)
    assert batch.dtype == tf.bfloat16 and batch.shape == (4, 3)
    assert tf.cast(batch, tf.float32)[:, 0].numpy().tolist() == [0, 1, 2, 3]


def test_a_data_frame_is_refused_and_from_arrays_is_named():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ctl.UsageError, match=r"a DataFrame.*ctl.from_arrays\(frame, batch_size\)"):
        ctl.from_source(pandas.DataFrame({"a": [1, 2]}), 2)


def test_a_grain_map_dataset_that_filters_is_refused():
    grain = pytest.importorskip("grain")
    for keeps in (lambda x: x % 2 == 1, lambda x: x < 4):  # examples 0 and 4 are None
        source = grain.MapDataset.range(8).filter(keeps)
        with pytest.raises(ctl.UsageError, match="filters its examples.*Filter the indices first"):
            ctl.from_source(source, 8).read_first(8)


def test_equal_numbers_and_text_of_any_length_keep_their_values():
    integers = ctl.from_source([np.int32(1), np.int64(2)], 2).read_first(2)
    assert integers.dtype == tf.int32 and integers.numpy().tolist() == [1, 2]
    texts = ctl.from_source([np.array([b"a"]), np.array([b"longer"])], 2).read_first(2)
    assert texts.numpy().tolist() == [[b"a"], [b"longer"]]


def test_a_compiled_loop_refuses_a_source():
    class Compiled(Small):
        def train_data(self, batch_size):
            return ctl.from_source(Numbers(), batch_size)

    with pytest.raises(ctl.UsageError, match=r"requires data in memory.*a source.*from_arrays"):
        Compiled(writers=[], strategy="one_device", jit_compile="loop").train(2)


def test_further_evaluations_and_trainings_start_no_further_threads():
    class Evaluated(Small):
        def train_data(self, batch_size):
            return ctl.from_source(list(zip(*examples(), strict=True)), batch_size, num_threads=5)

        eval_data = train_data

    trainer = Evaluated(strategy="default", writers=[], intervals=every_step())
    numbers = []
    for _ in range(3):
        trainer.train(trainer.step + 2)
        trainer.evaluate()
        numbers.append(sum(thread.name.startswith("ctl-source") for thread in threading.enumerate()))
    assert numbers[0] == numbers[-1] > 0
