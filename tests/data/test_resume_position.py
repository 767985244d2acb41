"""Data position of a resumed run: by index, by skipping, or from a saved iterator."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.data import dataset_traits, resume_position, sharding
from ctl.distribute.topology import Topology
from small_models import every_step

EXAMPLES, BATCH = 40, 8


def examples():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return x, x.sum(axis=1)


def trace_of(writer):
    return [(step, values["loss"]) for run, step, values in writer.rows if run == "train"]


class LeastSquares(ctl.Trainer):
    """Least squares on a shuffled, repeated dataset. The loss of each step identifies its batch."""

    def build(self):
        self.model = tf.Module()
        self.model.w = tf.Variable(tf.zeros([3]))
        self.optimizer = keras.optimizers.SGD(0.05)

    def train_data(self, batch_size):
        data = tf.data.Dataset.from_tensor_slices(examples())
        return data.shuffle(20).repeat().batch(batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.square(tf.linalg.matvec(x, self.model.w) - y)
            mean = self.average(loss)
        self.minimize(mean, tape, variables=[self.model.w])
        return {"loss": loss}


class InMemory(LeastSquares):
    def train_data(self, batch_size):
        return ctl.from_arrays(examples(), batch_size)


def with_mode(mode, base=LeastSquares):
    return type("Moded", (base,), {"data_position": mode})


TRAINER_BY_MODE = {"skip": with_mode("skip"), "iterator": with_mode("iterator"),
         "indexed": with_mode("indexed", InMemory)}  # fmt: skip


CASES = [(mode, replicas) for mode in TRAINER_BY_MODE for replicas in (1, 2)]


@pytest.mark.parametrize("case", some_of(CASES, ("skip", 2), ("iterator", 1), ("indexed", 1)), ids=str)
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(case, tmp_path, two_replicas):
    mode, replicas = case
    strategy = two_replicas if replicas == 2 else "default"
    options = {"strategy": strategy, "global_batch_size": BATCH, "intervals": every_step(), "seed": 3}
    uninterrupted, before, after = (ctl.MemoryWriter() for _ in range(3))
    TRAINER_BY_MODE[mode](writers=[uninterrupted], **options).train(12)
    TRAINER_BY_MODE[mode](writers=[before], model_dir=tmp_path, **options).train(7)
    TRAINER_BY_MODE[mode](writers=[after], model_dir=tmp_path, **options).train(12)
    assert trace_of(before) + trace_of(after) == trace_of(uninterrupted)
    assert len(set(trace_of(uninterrupted))) == 12


class Branches(TRAINER_BY_MODE["iterator"]):
    """Python's `if` on a tensor, which AutoGraph has to convert."""

    def train_step(self, batch):
        scores = super().train_step(batch)
        if tf.reduce_sum(batch[0]) > 0.0:
            scores["loss"] = scores["loss"] * 2.0
        return scores


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_a_step_may_branch_on_tensors_where_the_iterator_is_saved(replicas, two_replicas):
    strategy = two_replicas if replicas == 2 else "one_device"
    means = Branches(strategy=strategy, global_batch_size=BATCH, writers=[], seed=3).train(2)
    assert means["loss"] > 0.0


def test_an_iterator_continues_with_another_number_of_replicas(tmp_path, two_replicas):
    options = {"global_batch_size": BATCH, "intervals": every_step(), "seed": 3}
    trainer_class, uninterrupted, after = (
        TRAINER_BY_MODE["iterator"],
        ctl.MemoryWriter(),
        ctl.MemoryWriter(),
    )
    trainer_class(writers=[uninterrupted], strategy="default", **options).train(10)
    trainer_class(writers=[], strategy="default", model_dir=tmp_path, **options).train(6)
    trainer_class(writers=[after], strategy=two_replicas, model_dir=tmp_path, **options).train(10)
    np.testing.assert_allclose(
        [loss for _, loss in trace_of(after)], [loss for _, loss in trace_of(uninterrupted)][6:], rtol=1e-6
    )


class FromGenerator(LeastSquares):
    def train_data(self, batch_size):
        def numbers():
            yield from zip(*examples(), strict=True)

        spec = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.float32)
        return tf.data.Dataset.from_generator(numbers, output_signature=spec).repeat().batch(batch_size)


class Noisy(LeastSquares):
    def train_data(self, batch_size):
        return super().train_data(batch_size).map(lambda x, y: (x + tf.random.normal([3]), y))


class Scaled(LeastSquares):
    """Reads a variable in a map, which TensorFlow refuses to save."""

    def train_data(self, batch_size):
        scale = tf.Variable(2.0)
        return super().train_data(batch_size).map(lambda x, y: (scale * x, y))


class Nondeterministic(LeastSquares):
    def train_data(self, batch_size):
        options = tf.data.Options()
        options.deterministic = False
        return super().train_data(batch_size).with_options(options)


class NondeterministicMap(LeastSquares):
    def train_data(self, batch_size):
        data = super().train_data(batch_size)
        return data.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)


# test_dataset_traits.py has pipelines that are too large
@pytest.fixture(params=some_of(["serialized", "too large to be serialized"], "serialized"))
def serialized_or_too_large(request, monkeypatch):
    if request.param != "serialized":
        monkeypatch.setattr(dataset_traits, "_MAX_BYTES", -1)


@pytest.mark.usefixtures("serialized_or_too_large")
@pytest.mark.parametrize(
    ("trainer_class", "message"),
    [(FromGenerator, "from_generator"), (Noisy, "RandomStandardNormal"),
     (Nondeterministic, "deterministic=False"),
     (NondeterministicMap, "one of its operations has deterministic=False")],
)  # fmt: skip
def test_a_pipeline_that_may_not_repeat_itself_is_named_at_start(trainer_class, message, caplog, tmp_path):
    trainer_class(strategy="default", global_batch_size=BATCH, writers=[]).train(1)
    assert "resumed exactly only if" not in caplog.text  # without checkpoints there is no resume
    trainer_class(strategy="default", global_batch_size=BATCH, writers=[], model_dir=str(tmp_path)).train(1)
    assert any("resumed exactly only if" in m and message in m for m in caplog.messages)


@pytest.mark.usefixtures("serialized_or_too_large")
def test_a_pipeline_that_repeats_itself_is_not_named(caplog):
    LeastSquares(strategy="default", global_batch_size=BATCH, writers=[]).train(1)
    assert not caplog.messages


@pytest.mark.parametrize("trainer_class", [FromGenerator, Noisy, Scaled])
def test_an_iterator_that_cannot_be_saved_is_refused_before_a_step(trainer_class):
    trainer = with_mode("iterator", trainer_class)(strategy="default", global_batch_size=BATCH, writers=[])
    with pytest.raises(ctl.UsageError, match="cannot save its iterator.*'skip'"):
        trainer.train(1)
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("mode", "base", "message"),
    [("indexed", LeastSquares, "from_arrays"), ("skip", InMemory, "read by index"),
     ("iterator", InMemory, "read by index"), ("jump", LeastSquares, "expected one of auto")],
)  # fmt: skip
def test_a_mode_that_does_not_suit_the_data_is_refused(mode, base, message):
    with pytest.raises(ctl.UsageError, match=message):
        with_mode(mode, base)(strategy="default", global_batch_size=BATCH, writers=[]).train(1)


def test_files_of_an_iterator_are_unpacked_unchanged():
    files = [("iterator.index", b"\x00\xff" * 9), ("iterator.data-00000-of-00001", b"")]
    assert resume_position._unpacked(resume_position._packed(files)) == files
    assert resume_position._unpacked(resume_position._packed([("../x", b"1")])) == [("x", b"1")]


class Augmented(LeastSquares):
    """Noise from a Keras layer with a seed generator, in a parallel map."""

    def train_data(self, batch_size):
        noise = keras.layers.GaussianNoise(1.0)
        data = tf.data.Dataset.from_tensor_slices(examples()).repeat()
        return data.map(lambda x, y: (noise(x, training=True), y), num_parallel_calls=8).batch(batch_size)


@pytest.mark.usefixtures("serialized_or_too_large")
def test_random_layers_in_a_parallel_map_repeat_after_a_resume_too(tmp_path, caplog):
    caplog.set_level("INFO", "ctl")
    options = {"strategy": "default", "global_batch_size": BATCH, "intervals": every_step(), "seed": 3}
    traces = []
    for _ in range(2):
        writer = ctl.MemoryWriter()
        Augmented(writers=[writer], **options).train(12)
        traces.append(trace_of(writer))
    assert traces[0] == traces[1] and len(set(traces[0])) == 12
    before, after = ctl.MemoryWriter(), ctl.MemoryWriter()
    Augmented(writers=[before], model_dir=tmp_path, **options).train(7)
    Augmented(writers=[after], model_dir=tmp_path, **options).train(12)
    assert trace_of(before) + trace_of(after) == traces[0]
    assert any("one example at a time" in m for m in caplog.messages)


def test_a_dataset_that_was_shuffled_without_a_seed_before_is_named_where_a_run_may_be_resumed(
    tmp_path, caplog
):
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(examples()).shuffle(40).batch(BATCH)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ctl.fit(model, data, verbose=0)
    assert not caplog.messages
    ctl.fit(model, data, verbose=0, model_dir=str(tmp_path))
    [message] = caplog.messages
    assert "shuffled without a seed" in message and "write shuffle(n, seed=0)" in message


@pytest.mark.usefixtures("serialized_or_too_large")
@pytest.mark.parametrize("trainer_class", [Nondeterministic, NondeterministicMap])
def test_data_in_any_order_are_refused_on_several_workers(trainer_class):
    topology = Topology({"worker": ("a:1", "b:1")}, num_replicas=2)
    data = trainer_class(strategy="default", global_batch_size=BATCH, writers=[]).train_data(BATCH)
    with pytest.raises(ctl.UsageError, match="may come in any order .*deterministic=False.* 2 workers"):
        sharding.check_can_be_shared(data, "train_data", topology)
    sharding.check_can_be_shared(ctl.shard(data, "off"), "train_data", topology)


class Filtered(LeastSquares):
    """Reads a finite dataset of unknown length."""

    def train_data(self, batch_size):
        data = tf.data.Dataset.from_tensor_slices(examples())
        return data.filter(lambda x, y: x[0] > 0.0).batch(batch_size, drop_remainder=True)


def test_the_iterator_of_a_dataset_of_unknown_length_continues_in_the_next_pass(tmp_path):
    def trainer(directory):
        return with_mode("iterator", Filtered)(
            strategy="default", global_batch_size=BATCH, writers=[], model_dir=str(tmp_path / directory)
        )

    whole = trainer("a")
    whole.train(epochs=2)
    one_pass = Filtered(strategy="default", global_batch_size=BATCH, writers=[])
    one_pass.train(epochs=1)
    assert whole.step == 2 * one_pass.step > 2

    class Stops(ctl.NullCallback):
        def on_metrics(self, step, values, run):
            return ctl.Decision(stop=True) if step == one_pass.step + 1 else None

    for callbacks in ([Stops()], []):
        part = trainer("b")
        part.callbacks = callbacks
        part.intervals = ctl.Intervals(steps_per_loop=1, log=ctl.Every(steps=1))
        part.train(epochs=2)
    assert part.step == whole.step
    for actual, expected in zip(part.model.variables, whole.model.variables, strict=True):
        np.testing.assert_array_equal(actual, expected)
