"""Distribution of datasets to replicas: rows, start position and end."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.data.pipeline import open_eval_data, open_train_data
from ctl.distribute.row_partition import take_rows
from ctl.distribute.strategies import topology_of
from small_models import BATCH, Small, every_step, examples, losses

DEFAULT = tf.distribute.get_strategy()
NO_OUTPUT = dict(writers=[], intervals=every_step(log=ctl.Every()))


@pytest.fixture(scope="module")
def two_replicas():
    """One strategy for all tests, with separate keys: strategies of one process would share collectives."""

    class StrategyWithSeparateKeys(tf.distribute.MirroredStrategy):
        _collective_key_base = 2000

    return StrategyWithSeparateKeys(["/cpu:0", "/cpu:1"])


def open_batches(make, strategy=DEFAULT, *, size=8, train=False, **options):
    """Opens batches of `make(batch_size)`, or of the given source."""
    source = make if callable(make) else lambda batch_size: make
    if train:
        options |= {"seed": 0}
        return open_train_data(source, strategy, topology_of(strategy), global_batch_size=size, **options)
    return open_eval_data(source, strategy, topology_of(strategy), global_batch_size=size, **options)


def steps_of(batches, strategy=DEFAULT, limit=1000):
    """Returns the rows by step and replica, without padding rows."""
    steps = []
    for element, _ in zip(batches.iterator, range(limit), strict=False):
        parts = strategy.experimental_local_results(element)
        shares = [batches.share_of(part) for part in parts]
        steps.append([s.rows if s.real_rows is None else take_rows(s.rows, 0, s.real_rows) for s in shares])
    return steps


def sizes(steps):
    return [[int(tf.shape(tf.nest.flatten(part)[0])[0]) for part in step] for step in steps]


def rows(part):
    """Returns a dense, ragged or sparse component as a list of rows."""
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.to_dense(part).numpy().tolist()
    return part.to_list() if isinstance(part, tf.RaggedTensor) else part.numpy().tolist()


@pytest.mark.parametrize("train", [True, False])
def test_two_replicas_share_the_rows_of_each_global_batch(two_replicas, train):
    data = tf.data.Dataset.range(21).batch(8)
    single_steps = steps_of(open_batches(data, train=train))
    replicated_steps = steps_of(open_batches(data, two_replicas, train=train), two_replicas)
    assert [sum(map(rows, step), []) for step in replicated_steps] == [
        rows(step[0]) for step in single_steps
    ]
    assert sizes(replicated_steps) == [[4, 4], [4, 4], [2, 3]]


def test_a_replica_without_rows_receives_a_padding_row(two_replicas):
    for source in (tf.data.Dataset.range(9).batch(8), np.arange(9)):
        batches = open_batches(source, two_replicas)
        last = [two_replicas.experimental_local_results(e) for e in batches.iterator][-1]
        assert [(rows(part), int(real)) for part, real in last] == [([8], 0), ([8], 1)]
        assert sizes(steps_of(open_batches(source, two_replicas), two_replicas)) == [[4, 4], [0, 1]]


@pytest.mark.parametrize("row_format", ["ragged", "sparse"])
def test_ragged_and_sparse_rows_are_shared_like_dense_ones(two_replicas, row_format):
    ragged = tf.ragged.constant([[i] * (1 + i % 3) for i in range(1, 12)], dtype=tf.int64)
    source = ragged if row_format == "ragged" else ragged.to_sparse()
    data = tf.data.Dataset.from_tensor_slices({"x": source, "y": tf.range(11)}).batch(4)
    steps = steps_of(open_batches(data, two_replicas, size=4), two_replicas)
    parts = [part for step in steps for part in step]
    pairs = [pair for p in parts for pair in zip(rows(p["x"]), rows(p["y"]), strict=True)]
    assert [y for _, y in pairs] == list(range(11))
    for row, y in pairs:
        assert [v for v in row if v] == [y + 1] * (1 + (y + 1) % 3)


@pytest.mark.parametrize("strategy", ["one", "two"])
def test_numpy_arrays_and_tuples_and_dictionaries_need_no_dataset(two_replicas, strategy):
    strategy = DEFAULT if strategy == "one" else two_replicas
    arrays = {"x": np.arange(13), "y": (np.arange(13) * 2, np.array(list("abcdefghijklm")))}
    steps = steps_of(open_batches(arrays, strategy), strategy)
    xs = [x for step in steps for p in step for x in rows(p["x"])]
    assert xs == list(range(13)), "an evaluation keeps the order"
    assert [y for step in steps for p in step for y in rows(p["y"][0])] == [2 * x for x in xs]
    batches = open_batches(arrays, strategy, train=True)
    assert batches.mode == "indexed" and batches.steps is None
    assert batches.steps_per_epoch == 13 / 8


UNBATCHED = tf.data.Dataset.range(20)
REFUSED = {
    "unbatched": (UNBATCHED, r"not batched.*dataset\.batch\(batch_size\)"),
    "empty": (UNBATCHED.take(0).batch(8), "train_data is empty"),
    "fewer than a batch": (UNBATCHED.take(5).batch(8, drop_remainder=True), "train_data is empty"),
    "another batch size": (
        UNBATCHED.batch(4, drop_remainder=True), "4 rows at a time; expected global batches of 8"),
    "none": (lambda batch_size: None, "returned None.*return"),
    "a generator of scalars": (
        lambda batch_size: (i for i in range(3)), "train_data gave a batch with 0; expected arrays"),
    "a list": (lambda batch_size: [1, 2, 3], "returned a list; expected a tf.data.Dataset"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_invalid_global_batches_are_one_clear_error(name):
    source, message = REFUSED[name]
    with pytest.raises(ctl.UsageError, match=message) as caught:
        open_batches(source, train=True)
    assert "\n" not in str(caught.value)


def test_a_batch_size_that_replicas_cannot_split_is_refused_with_two_valid_ones(two_replicas):
    with pytest.raises(ctl.UsageError, match="global_batch_size is 9.*e.g. 8 or 10"):
        open_batches(UNBATCHED.batch(9), two_replicas, size=9, train=True)


def test_batches_larger_than_the_global_batch_are_refused_when_they_come():
    class Large(Small):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples()).batch(2 * batch_size)

    with pytest.raises(ctl.UsageError, match="rows"):
        Large(strategy="default", **NO_OUTPUT).train(1)


def test_an_endless_evaluation_is_refused():
    with pytest.raises(ctl.UsageError, match="eval_data is endless.*repeat"):
        open_batches(UNBATCHED.batch(8).repeat())


def test_epochs_of_endless_data_are_refused():
    with pytest.raises(ctl.UsageError, match="is endless.*steps"):
        open_batches(UNBATCHED.repeat().batch(8), train=True, epochs=1)


def test_epochs_of_a_finite_dataset_repeat_it_and_round_up_to_a_step():
    data = UNBATCHED.batch(8)
    for epochs, expected in ((1, 3), (2, 6), (0.5, 2), (1.5, 5)):
        batches = open_batches(data, train=True, epochs=epochs)
        assert batches.steps == expected and batches.steps_per_epoch == 3
        assert len(steps_of(batches)) >= expected


def test_a_dataset_continues_after_the_consumed_examples():
    data = UNBATCHED.batch(8)
    batches = open_batches(data, train=True, start_examples=16, epochs=2)
    assert [rows(s[0]) for s in steps_of(batches)][:2] == [[16, 17, 18, 19], list(range(8))]


def test_a_shuffle_without_a_seed_has_the_same_order_when_opened_again(two_replicas):
    def make(batch_size):
        return tf.data.Dataset.range(64).shuffle(64).repeat().batch(batch_size)

    orders = []
    for strategy in (DEFAULT, DEFAULT, two_replicas):
        tf.random.uniform([])  # other random numbers in between have no effect
        steps = steps_of(open_batches(make, strategy, train=True), strategy, limit=16)
        orders.append([x for step in steps for part in step for x in rows(part)])
    assert orders[0] == orders[1] == orders[2]
    first, second = orders[0][:64], orders[0][64:]
    assert sorted(first) == sorted(second) == list(range(64)) and first != second
    resumed_steps = steps_of(open_batches(make, train=True, start_examples=40), limit=3)
    assert sum((rows(s[0]) for s in resumed_steps), []) == orders[0][40:64]


def test_the_policies_of_shard_are_checked_and_stored():
    policies = tf.data.experimental.AutoShardPolicy
    for policy_name, expected_policy in (
        ("auto", policies.AUTO),
        ("file", policies.FILE),
        ("off", policies.OFF),
    ):
        options = ctl.shard(UNBATCHED, policy_name).options()
        assert options.experimental_distribute.auto_shard_policy == expected_policy
    with pytest.raises(ctl.UsageError, match="shard policy is 'rows'; expected 'auto', 'data'"):
        ctl.shard(UNBATCHED, "rows")


def trainer_with_data(make):
    class TrainerWithData(Small):
        def train_data(self, batch_size):
            return make(batch_size)

    return TrainerWithData


def finite(steps, extra=0):
    x, y = examples()
    n = steps * BATCH + extra
    index = np.arange(n) % len(x)
    return tf.data.Dataset.from_tensor_slices((x[index], y[index]))


@pytest.mark.parametrize("strategy_name", some_of(["default", "two"], "default"))
def test_a_finite_dataset_of_25_batches_trains_25_steps(two_replicas, strategy_name):
    strategy = two_replicas if strategy_name == "two" else strategy_name
    trainer = trainer_with_data(lambda b: finite(25).batch(b))(strategy=strategy, **NO_OUTPUT)
    trainer.train()
    assert trainer.step == 25
    trainer.train(100)
    assert trainer.step == 25, "the data has ended"


@pytest.mark.parametrize("strategy_name", some_of(["default", "two"], "two"))
@pytest.mark.parametrize("steps_per_loop", some_of([1, 7], 7))
def test_data_of_unknown_length_ends_the_run_at_its_last_batch(two_replicas, strategy_name, steps_per_loop):
    strategy = two_replicas if strategy_name == "two" else strategy_name
    intervals = every_step(log=ctl.Every(), steps_per_loop=steps_per_loop)
    data = trainer_with_data(lambda b: finite(9, extra=5).filter(lambda x, y: True).batch(b))
    trainer = data(strategy=strategy, writers=[], intervals=intervals)
    trainer.train(4)
    assert trainer.step == 4
    means = trainer.train()
    assert trainer.step == 10 and np.isfinite(means["loss"])


def test_a_generator_s_dataset_ends_where_the_generator_does():
    def generator():
        x, y = examples()
        for i in range(60):
            yield x[i], y[i]

    signature = (tf.TensorSpec([8], tf.float32), tf.TensorSpec([], tf.int64))
    data = trainer_with_data(
        lambda b: tf.data.Dataset.from_generator(generator, output_signature=signature).batch(b)
    )
    trainer = data(strategy="default", **NO_OUTPUT)
    trainer.train(100)
    assert trainer.step == 3, "60 examples in batches of 24"


def test_data_of_unknown_length_that_is_empty_is_refused():
    trainer = trainer_with_data(lambda b: finite(1).filter(lambda x, y: False).batch(b))
    with pytest.raises(ctl.UsageError, match="train_data ended before its first batch"):
        trainer(strategy="default", **NO_OUTPUT).train(3)


def test_epochs_in_two_runs_contain_every_example_as_often_as_in_one():
    x = np.arange(10, dtype=np.float32)
    totals = []
    for runs in ((2,), (1, 2)):

        class Sum(ctl.Trainer):
            def build(self):
                self.model = tf.Module()
                self.model.seen = tf.Variable(tf.zeros([10]), trainable=False)

            def train_data(self, batch_size):
                return ctl.from_arrays(x, batch_size)

            def train_step(self, batch):
                self.model.seen.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(batch, tf.int32), 10), 0))
                return {"x": batch}

        trainer = Sum(strategy="default", global_batch_size=4, **NO_OUTPUT)
        for epochs in runs:
            trainer.train(epochs=epochs)
        totals.append(trainer.model.seen.numpy().tolist())
    assert totals[0] == [2.0] * 10
    assert totals[1] == totals[0]


def run_with_losses(trainer, *runs):
    writer = ctl.MemoryWriter()
    trainer._writers, trainer.intervals = [writer], every_step(steps_per_loop=1)
    for steps in runs:
        trainer.train(steps)
    return losses(writer)


def test_a_run_after_an_error_continues_with_the_next_batch():
    class Once(Small):
        failed = False

        def after_loop(self, step, means):
            if step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("once")

    trainer = Once(strategy="default")
    with pytest.raises(RuntimeError, match="once"):
        run_with_losses(trainer, 6)
    assert trainer.step == 3
    assert run_with_losses(trainer, 6) == run_with_losses(Small(strategy="default"), 6)[3:]


@pytest.mark.xfail(strict=True, reason="a shuffle that is iterated again has another order")
def test_a_dataset_object_continues_its_order_in_a_second_run():
    def stored():
        data = finite(4).shuffle(96, seed=1).repeat().batch(BATCH, drop_remainder=True)
        return trainer_with_data(lambda batch_size: data)(strategy="default")

    assert run_with_losses(stored(), 2, 6) == run_with_losses(stored(), 6)
