"""`ctl.Trainer`: errors for invalid trainers, step counts, hooks and losses."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import BATCH, Small, every_step, examples, losses, weights

NO_LOG = every_step(log=ctl.Every())


@pytest.fixture(scope="module")
def two_replicas():
    """One strategy for all tests, with separate keys: strategies of one process would share collectives."""

    class StrategyWithSeparateKeys(tf.distribute.MirroredStrategy):
        _collective_key_base = 4000

    return StrategyWithSeparateKeys(["/cpu:0", "/cpu:1"])


def make(trainer_class=Small, strategy="default", intervals=NO_LOG, writers=(), **options):
    return trainer_class(strategy=strategy, intervals=intervals, writers=list(writers), **options)


def run_with_losses(trainer_class=Small, steps=6, intervals=None, **options):
    """Trains and returns the logged losses and the trainer."""
    writer = ctl.MemoryWriter()
    trainer = make(trainer_class, intervals=intervals or every_step(), writers=[writer], **options)
    trainer.train(steps)
    return losses(writer), trainer


def test_missing_methods_are_named_with_an_example():
    class WithoutMethods(ctl.Trainer):
        pass

    class WithBuildOnly(WithoutMethods):
        def build(self):
            self.model = tf.Module()
            self.model.v = tf.Variable(0.0)

    for trainer_class, message in (
        (WithoutMethods, r"WithoutMethods has no build, train_data, train_step.*def build\(self\)"),
        (WithBuildOnly, r"WithBuildOnly has no train_data, train_step.*def train_data\(self, batch_size\)"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            make(trainer_class).train(1)
    with pytest.raises(ctl.UsageError, match=r"WithBuildOnly has no eval_data, eval_step; to evaluate"):
        make(WithBuildOnly).evaluate()


def test_a_model_that_was_made_in_init_is_refused_on_two_replicas(two_replicas):
    class BuildsInInit(Small):
        def __init__(self, **options):
            super().__init__(**options)
            super().build()

        def build(self):
            pass

    with pytest.raises(ctl.UsageError, match=r"outside the strategy's scope.*build\(\)"):
        make(BuildsInInit, two_replicas).train(1)


def trainer_with_build(function):
    class TrainerWithBuild(Small):
        def build(self):
            function(self)

    return TrainerWithBuild


def test_a_model_without_variables_is_refused():
    def unbuilt(self):
        self.model = keras.Sequential([keras.layers.Dense(3)])

    with pytest.raises(ctl.UsageError, match=r"Sequential, has no variables yet.*keras\.Input"):
        make(trainer_with_build(unbuilt)).prepare()
    with pytest.raises(ctl.UsageError, match="created no variables"):
        make(trainer_with_build(lambda self: None)).prepare()


@pytest.mark.parametrize("synchronized", [True, False])
def test_batch_normalization_has_to_be_synchronised_between_replicas(two_replicas, synchronized):
    def build(self):
        layer = keras.layers.BatchNormalization(synchronized=synchronized)
        inner = keras.Sequential([keras.Input((8,)), layer])
        self.model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(4)])
        self.optimizer = keras.optimizers.SGD(0.1)

    if synchronized:
        results = [
            run_with_losses(trainer_with_build(build), 3, strategy=s) for s in ("default", two_replicas)
        ]
        np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
        for a, b in zip(*(t.model.get_weights() for _, t in results), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        return
    with pytest.raises(ctl.UsageError, match=r"BatchNormalization\(synchronized=True\)"):
        make(trainer_with_build(build), two_replicas).train(1)
    make(trainer_with_build(build)).prepare()


@pytest.mark.parametrize("options", [
    {"global_batch_size": 0}, {"global_batch_size": 1.5}, {"global_batch_size": "8"}, {"seed": -1},
    {"global_batch_size": None},
])  # fmt: skip
def test_the_constructor_refuses_numbers_that_are_not_whole(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ctl.UsageError, match=rf"{name} is {value!r}; expected a whole number"):
        make(**options)


def test_a_model_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ctl.UsageError, match="is a file, or lies in one; expected a directory"):
        make(model_dir=str(tmp_path / "file" / "run")).prepare()


@pytest.mark.parametrize("length", [{"steps": 0}, {"steps": -3}, {"steps": 1.5}, {"epochs": 0},
                                 {"steps": 2, "epochs": 1}, {"epochs": -1}, {}])  # fmt: skip
def test_train_refuses_an_invalid_length(length):
    with pytest.raises(ctl.UsageError, match=r"steps|epochs"):
        make().train(**length)


class Hooked(Small):
    def __init__(self, stop_at=None, **options):
        super().__init__(**options)
        self.calls, self.stop_at = [], stop_at

    def after_loop(self, step, means):
        self.calls.append((step, means["loss"]))
        return step == self.stop_at


def test_after_loop_receives_the_step_and_the_means_of_its_loop_and_may_stop(two_replicas):
    expected, _ = run_with_losses(steps=11)
    for strategy in ("default", two_replicas):
        intervals = every_step(log=ctl.Every(steps=5), steps_per_loop=3)
        writer = ctl.MemoryWriter()
        trainer = make(Hooked, strategy, intervals, [writer], stop_at=10)
        trainer.train(100)
        assert [s for s, _ in trainer.calls] == [3, 5, 8, 10] and trainer.step == 10
        for (_, mean), loop in zip(trainer.calls, ([0, 1, 2], [3, 4], [5, 6, 7], [8, 9]), strict=True):
            assert mean == pytest.approx(np.mean([expected[i] for i in loop]), abs=1e-5)
        assert losses(writer) == pytest.approx([np.mean(expected[:5]), np.mean(expected[5:10])], abs=1e-5)


def test_an_error_of_after_loop_ends_the_run_and_is_raised_unchanged():
    class RaisesInAfterLoop(Small):
        def after_loop(self, step, means):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine$"):
        make(RaisesInAfterLoop).train(5)


@pytest.fixture(scope="module")
def losses_of_60_steps():
    return run_with_losses(steps=60)[0]


@pytest.fixture(scope="module")
def losses_by_loops_of_12():
    intervals = every_step(log=ctl.Every(steps=12), steps_per_loop=12)
    return run_with_losses(steps=60, intervals=intervals)[0]


@pytest.mark.parametrize("steps_per_loop", some_of([1, 7, "auto"], 7, "auto"))
def test_the_length_of_loops_does_not_change_the_logged_losses(
    losses_of_60_steps, losses_by_loops_of_12, steps_per_loop
):
    intervals = every_step(log=ctl.Every(steps=12), steps_per_loop=steps_per_loop)
    losses_by_12, trainer = run_with_losses(steps=60, intervals=intervals)
    assert trainer.step == 60
    assert losses_by_12 == pytest.approx(np.reshape(losses_of_60_steps, [5, 12]).mean(axis=1), abs=1e-6)
    assert losses_by_12 == losses_by_loops_of_12, "the losses are bitwise equal"


def test_a_second_call_of_train_continues(losses_of_60_steps):
    writer = ctl.MemoryWriter()
    trainer = make(intervals=every_step(), writers=[writer])
    for steps in (4, 4, 2, 9):
        trainer.train(steps)
    assert trainer.step == 9
    assert losses(writer) == losses_of_60_steps[:9]


def test_epochs_count_passes_over_the_data():
    trainer = make(intervals=every_step(evaluate=ctl.Every(epochs=1)))
    writer = trainer._writers = [ctl.MemoryWriter()]
    trainer.train(epochs=2.5)
    assert trainer.step == 10, "96 examples in batches of 24"
    assert [s for run, s, _ in writer[0].rows if run == "eval"] == [4, 8, 10]


def test_a_schedule_s_learning_rate_is_reported():
    def build(self):
        Small.build(self)
        self.optimizer = keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [0.5, 0.25, 0.125])
        )

    writer = ctl.MemoryWriter()
    intervals = every_step(log=ctl.Every(steps=2))
    make(trainer_with_build(build), intervals=intervals, writers=[writer]).train(8)
    rates = [v["learning_rate"] for *_, v in writer.rows]
    assert rates == [0.5, 0.5, 0.25, 0.125]  # the rates that the steps used


def test_an_evaluation_is_numpy_s_mean_for_every_batch_size_and_number_of_replicas(two_replicas):
    x, y = examples(seed=5)
    x, y = x[:13].astype(np.float64), y[:13]
    results = []
    for strategy, size in ((two_replicas, 4), ("default", 5), ("default", 64), (two_replicas, 12)):
        trainer = make(strategy=strategy, global_batch_size=size)
        results.append(trainer.evaluate()["loss"])
    w1, b1, w2, b2 = (w.astype(np.float64) for w in weights(trainer))
    logits = np.tanh(x @ w1 + b1) @ w2 + b2
    expected_losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(13), y]
    assert results == pytest.approx([expected_losses.mean()] * 4, abs=1e-6)


def test_a_writer_that_raises_is_disabled_and_training_continues(caplog):
    class Broken(ctl.NullWriter):
        def write(self, step, values, run="train"):
            raise OSError("disk full")

    writer = ctl.MemoryWriter()
    trainer = make(intervals=every_step(), writers=[Broken(), writer])
    trainer.train(3)
    assert trainer.step == 3 and len(losses(writer)) == 3
    assert [r.getMessage() for r in caplog.records if "Broken failed" in r.getMessage()] == [
        "Broken failed and is not called again: OSError: disk full"
    ]


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
    runs = [run_with_losses(dropout=0.5, tf_data=True, seed=s) for s in (3, 3, 4)]
    assert runs[0][0] == runs[1][0] != runs[2][0]
    for a, b in zip(weights(runs[0][1]), weights(runs[1][1]), strict=True):
        np.testing.assert_array_equal(a, b)


class Counted(Small):
    """Counts how often Python runs its step; its last batch is short."""

    traces = 0

    def train_data(self, batch_size):
        x, y = examples()
        return tf.data.Dataset.from_tensor_slices((x[:60], y[:60])).batch(batch_size).repeat()

    def train_step(self, batch):
        self.traces += 1
        return super().train_step(batch)


@pytest.mark.parametrize("strategy_name", some_of(["default", "two"], "two"))
def test_one_trace_serves_every_batch_and_every_run(two_replicas, strategy_name):
    trainer = make(Counted, two_replicas if strategy_name == "two" else strategy_name, every_step())
    trainer.train(4)
    trainer.evaluate()
    trainer.train(9)
    assert trainer.traces == trainer.strategy.num_replicas_in_sync


class Branching(Small):
    """Python's `if`, `while` and `for` on tensors."""

    def train_step(self, batch):
        scores = super().train_step(batch)
        total = tf.constant(0.0)
        if self.step_variable >= 2:
            for i in tf.range(3):
                total += tf.cast(i, tf.float32)
        return {**scores, "total": total}


@pytest.mark.slow  # test_autograph.py has such steps
def test_python_s_if_works_on_tensors_in_a_step(two_replicas):
    for strategy in ("default", two_replicas):
        writer = ctl.MemoryWriter()
        make(Branching, strategy, every_step(), [writer]).train(4)
        assert [v["total"] for *_, v in writer.rows] == [0.0, 0.0, 3.0, 3.0]


class WithInvalidStep(Small):
    def train_step(self, batch):
        return {"x": batch["image"]}


def test_an_error_of_the_step_itself_is_shown_with_its_line():
    with pytest.raises(TypeError, match=r'(?s)test_trainer\.py", line \d+, in train_step'):
        make(WithInvalidStep).train(1)


def test_a_step_that_returns_no_dictionary_is_refused():
    class Listing(Small):
        def train_step(self, batch):
            return [1.0]

    with pytest.raises(ctl.UsageError, match=r"returned list; expected a dictionary"):
        make(Listing).train(1)


class Weighted(Small):
    """Counts only class 0: by weights, or by a factor if `by_hand`."""

    by_hand = False

    def train_step(self, batch):
        _, y = batch
        weight = tf.cast(y == 0, tf.float32)
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            if self.by_hand:
                loss = tf.reduce_sum(scores["loss"] * weight) / BATCH
            else:
                loss = self.average(scores["loss"], sample_weight=weight)
        self.minimize(loss, tape)
        return scores


class ByHand(Weighted):
    by_hand = True


def test_weights_of_examples_are_factors_of_their_losses(two_replicas, losses_of_60_steps):
    expected = run_with_losses(ByHand)[0]
    assert abs(expected[-1] - losses_of_60_steps[5]) > 1e-2, "without effect"
    for strategy in ("default", two_replicas):
        np.testing.assert_allclose(run_with_losses(Weighted, strategy=strategy)[0], expected, atol=1e-6)


def test_dropout_differs_between_replicas(two_replicas):
    class Masks(Small):
        def train_data(self, batch_size):
            return np.ones([BATCH, 1000], np.float32)

        def build(self):
            self.model = keras.Sequential([keras.Input((1000,)), keras.layers.Dropout(0.5)])

        def train_step(self, batch):
            mask = self.model(batch, training=True)
            context = tf.distribute.get_replica_context()
            both = context.all_gather(mask[:1], axis=0)
            tf.debugging.assert_equal(tf.shape(both), [2, 1000])
            return {"same": tf.reduce_mean(tf.cast(both[0] == both[-1], tf.float32))}

    means = make(Masks, two_replicas).train(1)
    assert means["same"] == pytest.approx(0.5, abs=0.1)
