"""--jit_compile=loop: a loop over data in memory is one XLA program with the same results."""

import time

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.metrics.protocol import Traced
from ctl.profiling import profile_report, step_profiler
from ctl.step import replica_step
from ctl.training import compiled_loop
from small_models import Small

EXAMPLES, BATCH = 22, 4


def examples():
    generator = np.random.default_rng(0)
    return {"x": generator.normal(size=(EXAMPLES, 3)).astype(np.float32), "id": np.arange(EXAMPLES)}


class Follower(ctl.Trainer):
    """A model with weights that depend on the order of examples, a metric and a logged value."""

    epochs_apart, dropout = False, 0.0
    nan_at: int | None = None  # completed steps

    def build(self):
        self.model = tf.Module()
        self.model.weights = tf.Variable([0.1, -0.2, 0.3])
        self.optimizer = keras.optimizers.SGD(0.3, momentum=0.5)
        self.optimizer.build([self.model.weights])
        self.random = keras.layers.Dropout(self.dropout, seed=11)
        self.mean = keras.metrics.Mean()
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.ids_by_step = tf.Variable(tf.fill([64, BATCH], -1), trainable=False, aggregation=first)
        self.traces = 0

    def train_data(self, batch_size):
        data = ctl.from_arrays(examples(), batch_size, epochs_apart=self.epochs_apart)
        return data.map(lambda batch: (batch["x"] * 2.0, batch["id"]))

    def train_step(self, batch):
        self.traces += 1
        x, ids = batch
        row = tf.pad(tf.cast(ids, tf.int32), [[0, BATCH - tf.size(ids)]], constant_values=-1)
        index, row = self.step_variable[None, None], tf.reshape(row, [1, BATCH])
        self.ids_by_step.assign(tf.tensor_scatter_nd_update(self.ids_by_step, index, row))
        if self.nan_at is not None:
            x = tf.where(tf.equal(self.step_variable, self.nan_at), float("nan"), x)
        x = self.random(x, training=True)
        with tf.GradientTape() as tape:
            distance = tf.reduce_sum((self.model.weights - x) ** 2, axis=1)
            loss = self.average(distance)
        self.minimize(loss, tape, variables=[self.model.weights])
        self.mean.update_state(distance)
        self.log("sum of ids", tf.reduce_sum(ids), reduce="sum")
        return {"distance": distance, "mean": self.mean}


def follower(jit_compile, trainer_class=Follower, **options):
    settings = {"strategy": "default", "writers": [], "steps_per_loop": 3, "seed": 5, **options}
    return trainer_class(jit_compile=jit_compile, global_batch_size=BATCH, **settings)


def state(trainer):
    return trainer.model.weights.numpy(), trainer.ids_by_step.numpy()


def assert_same_state(expected, actual, *, rtol=1e-5):
    np.testing.assert_array_equal(expected[1], actual[1])
    np.testing.assert_allclose(expected[0], actual[0], rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(("epochs_apart", "epochs", "parts"), [
    (False, 1.1, 2), pytest.param(True, 1.5, 1, marks=pytest.mark.slow)
])  # fmt: skip
def test_examples_results_and_short_batches_are_those_of_an_uncompiled_loop(epochs_apart, epochs, parts):
    """In the first case the last batch has one row, so that one of its parts is empty."""

    class Case(Follower):
        def build(self):
            super().build()
            self.gradients = ctl.Gradients(accumulate_steps=parts)

    Case.epochs_apart = epochs_apart
    off, loop = follower("off", Case), follower("loop", Case)
    means = [trainer.train(epochs=epochs) for trainer in (off, loop)]
    assert off.step == loop.step == (9 if epochs_apart else 7)
    assert_same_state(state(off), state(loop))
    assert means[1] == pytest.approx(means[0], rel=1e-5)
    rows = (loop.ids_by_step.numpy()[: loop.step] != -1).sum(axis=1)
    assert set(rows) == ({4, 2} if epochs_apart else {2, 1})


@pytest.mark.parametrize("jit_compile", some_of(["step", "loop"], "step"))
def test_a_compiled_step_runs_on_a_device_that_is_not_the_first(jit_compile):
    """As on a GPU. The step reads the step counter, which must be on the same device."""
    second = ctl.make_strategy("one_device", devices=["cpu:1"])
    expected, actual = follower(jit_compile), follower(jit_compile, strategy=second)
    for trainer in (expected, actual):
        trainer.train(5)
    assert_same_state(state(expected), state(actual))
    assert actual.step_variable.device.endswith("CPU:1")


class Unmapped(Follower):
    dropout = 0.4

    def train_data(self, batch_size):
        return ctl.from_arrays((examples()["x"], examples()["id"]), batch_size)


@pytest.mark.slow
def test_a_run_resumes_within_an_epoch_with_another_jit_compile(tmp_path):
    """The dropout masks are those of an unbroken run; compiled loops give bitwise equal results."""
    trainers, unbroken = {}, {}
    for jit_compile in ("off", "loop"):
        options = {"model_dir": str(tmp_path / jit_compile), "save_every_steps": 4}
        trainers[jit_compile] = follower(jit_compile, Unmapped, **options)
        trainers[jit_compile].train(9)
        unbroken[jit_compile] = state(trainers[jit_compile])
    assert_same_state(unbroken["off"], unbroken["loop"])
    for first, second in (("off", "loop"), ("loop", "off"), ("loop", "loop")):
        trainers[second].restore(str(tmp_path / first / "checkpoints/ckpt-4"))
        trainers[second].ids_by_step.assign(tf.fill([64, BATCH], -1))
        trainers[second].train(9)
        resumed = state(trainers[second])
        assert (resumed[1][:4] == -1).all() and (resumed[1][4:9] != -1).all()
        resumed[1][:4] = unbroken[second][1][:4]
        assert_same_state(resumed, unbroken[second], rtol=0 if first == second else 1e-5)


class ManyFeatures(ctl.Trainer):
    """A step with a Keras model, gradient accumulation, EMA and a second optimizer."""

    def build(self):
        layers = [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        self.model = keras.Sequential(layers)
        rate = keras.optimizers.schedules.CosineDecay(0.05, 10)
        self.optimizer = keras.optimizers.AdamW(rate, use_ema=True, ema_overwrite_frequency=3)
        scaled = keras.optimizers.SGD(0.1)
        self.second = keras.optimizers.LossScaleOptimizer(scaled, initial_scale=4.0, dynamic_growth_steps=2)
        self.second.build(self.model.trainable_variables)
        self.gradients = ctl.Gradients(accumulate_steps=2, clip_norm=1.0)

    def train_data(self, batch_size):
        generator = np.random.default_rng(0)
        x = generator.normal(size=(EXAMPLES, 3)).astype(np.float32)
        return ctl.from_arrays((x, x[:, 0] > 0), batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)
            loss = self.average(losses)
        self.minimize(loss, tape, when=self.step_variable % 2 == 0)
        self.minimize(loss, tape, optimizer=self.second)
        self.log("positive", tf.reduce_sum(tf.cast(y, tf.int32)), reduce="sum")  # means of integers
        return {"loss": losses}


@pytest.mark.slow
def test_a_step_with_many_features_gives_the_same_results():
    # other orders give batches of two similar rows, of which BatchNormalization amplifies the rounding
    off, loop = follower("off", ManyFeatures, seed=7), follower("loop", ManyFeatures, seed=7)
    means = [trainer.train(7) for trainer in (off, loop)]
    assert means[1] == pytest.approx(means[0], rel=1e-4)
    assert 0 < means[0]["positive"] < BATCH  # finite although one part of a batch is empty
    assert int(off.second.dynamic_scale) == int(loop.second.dynamic_scale) > 4
    pairs = [*zip(off.model.variables, loop.model.variables, strict=True),
             *zip(off.optimizer.variables, loop.optimizer.variables, strict=True)]  # fmt: skip
    for a, b in pairs:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5)


class Broken(Follower):
    nan_at = 4  # within the second loop


def test_the_step_that_is_not_finite_stops_the_run_and_is_not_applied():
    """The later steps would be finite; they do not run."""
    weights, errors = [], []
    for jit_compile in ("off", "loop"):
        trainer = follower(jit_compile, OneBad, strategy="one_device", steps_per_loop=4)
        with pytest.raises(ctl.NonFiniteError) as raised:
            trainer.train(20)
        errors.append(str(raised.value))
        weights.append(trainer.model.weights.numpy())
        assert 1 < trainer.step < 6 and f"Step {trainer.step + 1}: " in errors[-1]
        assert trainer.step % 4 < 3  # more steps follow in the loop
    assert errors[0] == errors[1]
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)


@pytest.mark.slow  # the test before it stops the run
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_not_finite_is_skipped_or_rolled_back_as_in_an_uncompiled_loop(
    policy, tmp_path, capfd
):
    means, trainers, log_lines = [], [], []
    for jit_compile in ("off", "loop"):
        saving = {"model_dir": str(tmp_path / jit_compile), "save_every_steps": 2}
        options = saving if policy == "rollback" else {}
        trainer_class = OneBad if policy == "rollback" else Broken
        options |= {"strategy": "mirrored", "devices": ["cpu:0"]} if policy == "skip" else {}
        trainers.append(follower(jit_compile, trainer_class, on_nonfinite=policy, **options))
        means.append(trainers[-1].train(9))
        lines = capfd.readouterr().err.splitlines()
        log_lines.append([line for line in lines if line.startswith(("ctl: step", "Step"))])
    assert_same_state(*map(state, trainers))
    assert means[1] == pytest.approx(means[0], rel=1e-5)
    assert log_lines[0] == log_lines[1]
    assert any("is skipped: loss or gradient is not finite" in line for line in log_lines[1])


def test_skipped_steps_beyond_the_reports_are_counted(monkeypatch, capfd, caplog):
    monkeypatch.setattr(compiled_loop, "_MAX_REPORTS", 2)

    class AllBad(Follower):
        def train_data(self, batch_size):
            return ctl.from_arrays((examples()["x"] * np.float32("nan"), np.arange(EXAMPLES)), batch_size)

    trainer = follower("loop", AllBad, on_nonfinite="skip", steps_per_loop=4)
    trainer.train(4)
    assert trainer.step == 4 and capfd.readouterr().err.count("is skipped: loss or gradient") == 2
    assert "2 more of these 4 steps were skipped" in caplog.text


class CountsTraces(ctl.NullWriter):
    num_traces = 0

    def note(self, event):
        self.num_traces += isinstance(event, Traced)


class Freezes(Small):
    """A model whose first layer is frozen after two steps."""

    def after_loop(self, step, means):
        self.model.layers[0].trainable = step < 2


def test_a_layer_that_is_frozen_between_loops_is_not_trained_any_more(caplog):
    caplog.set_level("INFO", "ctl")
    trained = {}
    for jit_compile in ("off", "loop"):
        writer = CountsTraces()
        trainer = Freezes(strategy="default", writers=[writer], steps_per_loop=2, jit_compile=jit_compile)
        trainer.train(6)
        assert writer.num_traces == 2  # the second loop is known to compile, which may take long
        trained[jit_compile] = trainer.model.get_weights()
    for expected, actual in zip(trained["off"], trained["loop"], strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert caplog.messages.count(replica_step.RETRACE_MESSAGE) == 2


class OneBad(Follower):
    def train_data(self, batch_size):
        bad = examples()
        bad["x"][5] = np.inf  # example of the third step
        return ctl.from_arrays((bad["x"], bad["id"]), batch_size)


def test_loops_of_all_lengths_run_one_program(caplog):
    class Timed(Unmapped):
        dropout = 0.0

        def after_loop(self, step, means):
            self.ends = [*getattr(self, "ends", []), time.perf_counter()]

    trainer = follower("loop", Timed, steps_per_loop=2)
    start = time.perf_counter()
    trainer.train(25)
    first, traces = trainer.ends[0], trainer.traces
    loops = np.diff(trainer.ends)
    assert len(loops) == 12 and np.median(loops) < first - start  # no loop was compiled again
    trainer.train(26)
    assert trainer.traces == traces == 1
    assert not caplog.text, "no operation is slow or left out"
    with pytest.raises(ctl.UsageError, match="jit_compile was set to False after the model was built"):
        trainer.jit_compile = False


class Datasets(Follower):
    def train_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices(np.ones((8, 3))).batch(batch_size)


class Numbers(Follower):
    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)


class Strings(Follower):
    def train_data(self, batch_size):
        return ctl.from_arrays((np.ones((8, 3)), np.array(["a"] * 8)), batch_size)


class Unseeded(Follower):
    def train_step(self, batch):
        return super().train_step((batch[0] + tf.random.normal([3]), batch[1]))


class Printed(Follower):
    def train_step(self, batch):
        tf.print(batch[1])
        return super().train_step(batch)


@pytest.mark.parametrize(("trainer_class", "error_pattern"), [
    (Datasets, "returns a tf.data.Dataset. Return ctl.from_arrays"), (Numbers, "returns only numbers"),
    (Strings, "with string in train_data: XLA supports numbers only"),
    (Unseeded, "RandomStandardNormal, whose numbers XLA does not"), (Printed, "XLA cannot compile this"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_steps_and_data_unsupported_by_xla_are_refused_before_the_first_step(trainer_class, error_pattern):
    trainer = follower("loop", trainer_class)
    with pytest.raises(ctl.UsageError, match=error_pattern):
        trainer.train(3)
    assert trainer.step == 0 and not trainer.mean.count.numpy()


class Checked(Unmapped):
    def train_step(self, batch):
        pixels = tf.nn.conv2d(batch[0][:, :, None, None], tf.ones([1, 1, 1, 1]), 1, "SAME")
        tf.debugging.assert_greater(tf.reduce_max(pixels), 99.0)
        return super().train_step(batch)


def test_ignored_assertions_and_slow_operations_are_logged(caplog):
    follower("loop", Checked).train(1)
    assert "XLA removes assertions" in caplog.text and "convolutions on a CPU" in caplog.text


@pytest.mark.slow
def test_ctl_profile_shows_the_time_of_a_program_as_one_part(capsys, monkeypatch):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    monkeypatch.setattr(step_profiler, "_MIN_SECS", 0.0)
    follower("loop", Unmapped, steps_per_loop=1).train(10)
    table = capsys.readouterr().out
    assert "graph calls" in table and "cannot be measured separately" in table
    assert "waiting for input" not in table


def test_several_replicas_are_refused(two_replicas):
    with pytest.raises(ctl.UsageError, match="2 replicas.*--strategy=one_device.*--jit_compile=step"):
        follower("loop", strategy=two_replicas).train(1)
