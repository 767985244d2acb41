"""Examples in memory: one global order for every number of replicas, from any position."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of


def batches(data, *, replicas=1, start=0, total=None, steps=None, seed=3):
    """Returns the global batches, joined from the parts of the replicas, and the parts."""
    dataset = data.replica_batches(
        seed=seed, start=start, total=total, replicas=range(replicas), num_replicas=replicas
    )
    has_real_rows = data.has_counted_shares(start, total, replicas)
    elements = dataset.take(steps * replicas if steps else -1).as_numpy_iterator()
    parts = [b[0][: b[1]].tolist() if has_real_rows else b.tolist() for b in elements]
    parts_by_batch = [parts[i : i + replicas] for i in range(0, len(parts), replicas)]
    return [sum(batch_parts, []) for batch_parts in parts_by_batch], parts_by_batch


def flat(data, **options):
    return sum(batches(data, **options)[0], [])


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_every_epoch_is_another_permutation_of_the_examples(n):
    order = flat(ctl.from_arrays(np.arange(n), 5), total=3 * n)
    epochs = [order[i : i + n] for i in range(0, 3 * n, n)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(n))
    assert n < 7 or (epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0]))


@pytest.mark.parametrize("size", [12, 10])
@pytest.mark.parametrize("total", [None, 29])
def test_the_global_order_does_not_depend_on_the_replicas(size, total):
    data = ctl.from_arrays(np.arange(17), size)
    options = dict(total=total, steps=None if total else 5)
    one_replica_batches = batches(data, **options)[0]
    for replicas in (2, 3, 4):
        joined, parts_by_batch = batches(data, replicas=replicas, **options)
        assert joined == one_replica_batches
        sizes = [len(part) for part in parts_by_batch[-1]]
        assert max(sizes) - min(sizes) <= 1


def test_a_worker_reads_the_rows_of_its_own_replicas_only():
    data = ctl.from_arrays(np.arange(40), 8)
    parts_by_batch = batches(data, replicas=4, total=40)[1]
    second = data.replica_batches(
        seed=3, start=0, total=40, replicas=range(2, 4), num_replicas=4
    ).as_numpy_iterator()
    assert [b.tolist() for b in second] == [
        part for batch_parts in parts_by_batch for part in batch_parts[2:]
    ]


FEW_STARTS = (0, 1, 4, 11, 14, 29)  # within and at the end of a batch and of an epoch


@pytest.mark.parametrize("starts", some_of([FEW_STARTS, range(30)], FEW_STARTS), ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_start_at_any_position_continues_the_order(replicas, starts):
    data = ctl.from_arrays(np.arange(11), 4)
    uninterrupted = flat(data, total=30)
    for start in starts:
        assert flat(data, start=start, total=30, replicas=replicas) == uninterrupted[start:]
    endless = flat(data, start=13, steps=4, replicas=replicas)
    assert endless == flat(data, steps=9)[13:29]
    assert flat(data, start=30, total=30) == []


def test_epochs_end_with_a_short_batch_and_a_number_of_steps_does_not():
    data = ctl.from_arrays(np.arange(10), 4)
    assert [len(b) for b in batches(data, total=20)[0]] == [4] * 5
    assert [len(b) for b in batches(data, total=10)[0]] == [4, 4, 2]
    assert [len(b) for b in batches(data, steps=4)[0]] == [4] * 4


def test_the_seed_determines_the_order_and_that_of_from_arrays_has_precedence():
    def data(**options):
        return ctl.from_arrays(np.arange(50), 50, **options)

    assert flat(data(), total=50, seed=1) == flat(data(), total=50, seed=1)
    assert flat(data(), total=50, seed=1) != flat(data(), total=50, seed=2)
    assert flat(data(seed=1), total=50, seed=2) == flat(data(), total=50, seed=1)
    for unshuffled in (data(shuffle=False), data().in_order()):
        assert flat(unshuffled, total=50) == list(range(50))


def test_map_works_on_batches_in_the_order_it_was_written_and_leaves_the_original():
    data = ctl.from_arrays(np.arange(6), 4, shuffle=False)
    changed = data.map(lambda x: x + 1).map(lambda x: tf.stack([x * 10, tf.ones_like(x)], 1))
    assert flat(changed.in_order(), total=6) == [[10 * i, 1] for i in range(1, 7)]
    assert flat(data, total=6) == list(range(6))


def test_nested_arrays_and_strings_stay_together():
    n = 9
    strings = np.array([f"w{i}" for i in range(n)])
    data = ctl.from_arrays(
        {"a": (np.arange(n), strings), "b": (np.arange(n * 2).reshape(n, 2), tf.range(n))}, 4
    )
    dataset = data.replica_batches(seed=0, start=0, total=n, replicas=range(1), num_replicas=1)
    numbers_in_order = []
    for batch in dataset.as_numpy_iterator():
        batch_numbers, names = batch["a"]
        assert [b.decode() for b in names] == [f"w{i}" for i in batch_numbers]
        assert (batch["b"][0][:, 0] == 2 * batch_numbers).all() and (batch["b"][1] == batch_numbers).all()
        numbers_in_order += batch_numbers.tolist()
    assert sorted(numbers_in_order) == list(range(n))


def test_map_takes_tuples_as_arguments():
    data = ctl.from_arrays((np.arange(4), np.arange(4) * 2), 4).map(lambda x, y: y - x)
    assert sorted(flat(data, total=4)) == list(range(4))


@pytest.mark.parametrize("nested", [True, False])
def test_a_list_of_arrays_is_taken_like_a_tuple(nested):
    arrays = [np.arange(4), np.zeros([4, 2])]
    data = ctl.from_arrays({"a": arrays} if nested else arrays, 2)
    dataset = data.replica_batches(seed=0, start=0, total=4, replicas=range(1), num_replicas=1)
    first, second = tf.nest.flatten(next(iter(dataset)))
    assert first.shape == [2] and second.shape == [2, 2]


def test_tensors_of_strings_are_examples_like_any_other():
    data = ctl.from_arrays(tf.constant(["a", "b", "c"]), 2, shuffle=False)
    assert flat(data, total=3) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((), "no arrays"),
        ((np.zeros(3), np.zeros(4)), r"\(3,\), \(4,\).*same number of examples"),
        (np.float32(1), r"same number of examples"),
        (np.zeros([0, 2]), "0 examples"),
        (np.array([[1], [2, 3]], dtype=object), "Python objects.*ragged"),
    ],
)
def test_arrays_of_different_length_are_refused(arrays, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.from_arrays(arrays, 2)
