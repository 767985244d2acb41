"""NaN and infinity: detection on every replica before the update, and the policies."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.step import finiteness
from small_models import every_step

EXAMPLES, BATCH, BAD = 64, 8, 3  # the bad example is in the fourth batch of the order below
PLACES = "loss", "gradient", "statistics"


class Poisoned(ctl.Trainer):
    """Linear regression with batch statistics; the example `bad` makes the value `where` not finite."""

    where, policy = "loss", "stop"
    factor = float("nan")

    def build(self):
        self.model = keras.Sequential([
            keras.Input((3,)), keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(0.05)
        self.gradients = ctl.Gradients(on_nonfinite=self.policy)

    def train_data(self, batch_size):
        x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
        order = np.arange(EXAMPLES)
        bad = order == BAD * BATCH + 6  # on the second of two replicas
        arrays = {"x": x, "y": x.sum(axis=1), "bad": bad}
        return ctl.from_arrays(arrays, batch_size, shuffle=False)

    def train_step(self, batch):
        x = batch["x"]
        if self.where == "statistics":
            x = tf.where(batch["bad"][:, None], self.factor, x)
        with tf.GradientTape() as tape:
            error = self.model(x, training=True)[:, 0] - batch["y"]
            loss = tf.square(error)
            if self.where == "loss":
                loss = tf.where(batch["bad"], self.factor, loss)
            elif self.where == "gradient":  # the root of 0 has an infinite slope
                loss += tf.sqrt(tf.where(batch["bad"], 0.0 * error, 1.0))
            mean = self.average(loss)
        self.minimize(mean, tape)
        return {"loss": loss}


def trainer(where, policy, strategy="default", **options):
    trainer_class = type("Configured", (Poisoned,), {"where": where, "policy": policy})
    options = {"intervals": every_step(), "writers": [], **options}
    return trainer_class(strategy=strategy, global_batch_size=BATCH, **options)


def state_of(trained_trainer):
    return [v.numpy() for v in trained_trainer._prepared_trainer.state.variables.values()]


@pytest.mark.parametrize("where", some_of(PLACES, "gradient", "statistics"))
def test_stop_names_step_and_culprit_and_the_update_is_not_applied(where):
    failing = trainer(where, "stop")
    culprit = "gradient" if where == "gradient" else "loss"
    with pytest.raises(ctl.NonFiniteError, match=f"Step 4: .*the {culprit}.* NaN or infinite.*not applied"):
        failing.train(8)
    assert failing.step == 3 and int(failing.optimizer.iterations.numpy()) == 3
    assert all(np.isfinite(w).all() for w in failing.model.trainable_variables)


@pytest.mark.parametrize("where", some_of(["loss", "gradient"], "gradient"))
def test_the_replica_is_named(where, two_replicas):
    failing = trainer(where, "stop", two_replicas)
    with pytest.raises(ctl.NonFiniteError, match=f"Step 4: the {where} on replica 1 is NaN"):
        failing.train(8)
    assert failing.step == 3


def test_the_newest_checkpoint_is_named_and_it_is_from_before(tmp_path):
    failing = trainer("loss", "stop", model_dir=tmp_path, intervals=every_step(save=ctl.Every(steps=2)))
    with pytest.raises(ctl.NonFiniteError, match="the newest checkpoint is of step 2"):
        failing.train(8)


@pytest.mark.parametrize("num_replicas", some_of([1, 2], 2))
@pytest.mark.parametrize("where", some_of(PLACES, "loss"))
def test_a_skipped_step_changes_only_the_step_number(where, num_replicas, two_replicas):
    """The result is that of training on the data without this batch."""
    strategy = two_replicas if num_replicas == 2 else "default"
    writer = ctl.MemoryWriter()
    skipping = trainer(where, "skip", strategy, writers=[writer])
    skipping.train(8)

    class Without(Poisoned):
        def train_data(self, batch_size):
            arrays = super().train_data(batch_size).rows.tensors()
            is_kept = np.arange(EXAMPLES) // BATCH != BAD
            arrays_without_bad = {k: np.asarray(v)[is_kept] for k, v in arrays.items()}
            return ctl.from_arrays(arrays_without_bad, batch_size, shuffle=False)

    Without.where, clean_writer = where, ctl.MemoryWriter()
    options = {"strategy": strategy, "global_batch_size": BATCH, "intervals": every_step()}
    reference = Without(writers=[clean_writer], **options)
    reference.train(7)
    for a, b in zip(state_of(skipping)[1:], state_of(reference)[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    rows = [values for run, _, values in writer.rows if run == "train"]
    assert [values["skipped_steps"] for values in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert np.isnan(rows[3]["loss"]), "the skipped step has no loss"
    losses_without_bad = [values["loss"] for i, values in enumerate(rows) if i != BAD]
    expected = [values["loss"] for run, _, values in clean_writer.rows if run == "train"]
    np.testing.assert_allclose(losses_without_bad, expected, rtol=1e-5)
    assert skipping.step == 8


@pytest.mark.parametrize("num_replicas", some_of([1, 2], 1))
@pytest.mark.parametrize("variant", ["accumulate", "in the graph"])
def test_skipping_within_accumulation_and_within_long_loops(variant, num_replicas, two_replicas):
    class Skipping(Poisoned):
        policy = "skip"

        def build(self):
            super().build()
            if variant == "accumulate":  # TensorFlow has no sums over replicas within its loop
                self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                self.gradients = ctl.Gradients(on_nonfinite="skip", accumulate_steps=2)

    writer = ctl.MemoryWriter()
    intervals = ctl.Intervals(log=ctl.Every(steps=8), save=ctl.Every())
    skipping = Skipping(
        strategy=two_replicas if num_replicas == 2 else "default", global_batch_size=BATCH,
        intervals=intervals, writers=[writer],
    )  # fmt: skip
    skipping.train(8)
    ((_, step, values),) = [row for row in writer.rows if row[0] == "train"]
    assert step == 8 and values["skipped_steps"] == 1 / 8 and np.isfinite(values["loss"])
    assert int(skipping.optimizer.iterations.numpy()) == 7


@pytest.mark.parametrize("hook", some_of([False, True], False))
def test_rollback_restores_the_newest_checkpoint_and_skips_the_bad_data(hook, tmp_path, caplog):
    writer = ctl.MemoryWriter()
    members = {"policy": "rollback", **({"after_loop": lambda *_: None} if hook else {})}
    rolled_back = type("RolledBack", (Poisoned,), members)(
        strategy="default", global_batch_size=BATCH, model_dir=tmp_path, writers=[writer],
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    rolled_back.train(6)
    rows = [(step, values["loss"]) for run, step, values in writer.rows if run == "train"]
    assert [step for step, _ in rows] == [1, 2, 3, 3, 4, 5, 6], "step 4 failed, continued from step 2"
    assert any("back to the checkpoint of step 2" in m and "16 examples" in m for m in caplog.messages)

    class Straight(Poisoned):  # the batches 0, 1, 4, 5, 6, 7
        def train_data(self, batch_size):
            arrays = super().train_data(batch_size).rows.tensors()
            is_kept = ~np.isin(np.arange(EXAMPLES) // BATCH, [2, 3])
            return ctl.from_arrays(
                {k: np.asarray(v)[is_kept] for k, v in arrays.items()}, batch_size, shuffle=False
            )

    reference = Straight(strategy="default", global_batch_size=BATCH, writers=[], intervals=every_step())
    reference.train(6)
    for a, b in zip(state_of(rolled_back), state_of(reference), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rolled_back_run_that_is_resumed_continues_with_the_right_data(tmp_path):
    intervals = every_step(save=ctl.Every(steps=2))
    unbroken, resumed = ctl.MemoryWriter(), ctl.MemoryWriter()
    for directory, end_steps, writer in (("a", [7], unbroken), ("b", [5, 7], resumed)):
        for steps in end_steps:
            trainer("loss", "rollback", model_dir=tmp_path / directory, intervals=intervals,
                    writers=[writer]).train(steps)  # fmt: skip
    assert [r[2]["loss"] for r in unbroken.rows] == [r[2]["loss"] for r in resumed.rows]


def test_a_rollback_without_a_checkpoint_is_an_error():
    with pytest.raises(ctl.NonFiniteError, match="no checkpoint to roll back to.*save_every_steps"):
        trainer("loss", "rollback").train(8)


def test_repeated_rollbacks_to_one_checkpoint_are_an_error(tmp_path):
    class Always(Poisoned):
        policy = "rollback"

        def train_step(self, batch):
            bad = self.step_variable >= 3
            return super().train_step({**batch, "bad": tf.fill(tf.shape(batch["bad"]), bad)})

    failing = Always(
        strategy="default", global_batch_size=BATCH, model_dir=tmp_path, writers=[],
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    with pytest.raises(ctl.NonFiniteError, match="3 rollbacks to the checkpoint of step 2"):
        failing.train(8)


def test_data_that_end_end_earlier_after_a_rollback(tmp_path):
    intervals = every_step(save=ctl.Every(steps=2))
    rolled_back = trainer("loss", "rollback", model_dir=tmp_path, intervals=intervals)
    rolled_back.train(epochs=1)
    assert rolled_back.step == 6, "8 batches, 2 of them were rolled back"


def test_a_policy_of_another_name_is_refused():
    with pytest.raises(ctl.UsageError, match="on_nonfinite is 'ignore'; expected 'stop', 'skip' or"):
        ctl.Gradients(on_nonfinite="ignore")


@pytest.mark.parametrize(
    ("tf_message", "expected"),
    [
        ("x [1] [0] y", "the loss is NaN or infinite"),
        ("[0 1 0 1] [0 0 0 0]", "the loss on replica 1 (worker 0), 3 (worker 1) is NaN or infinite"),
        ("[0 0 0 0] [0 0 1 0]", "the gradient on replica 2 (worker 1) is NaN or infinite"),
        ("[0 0 0 0] [0 0 0 0]", "the sum of the gradients is NaN or infinite"),
        ("nothing of that kind", "the loss or the gradient is NaN or infinite"),
    ],
)
def test_an_error_message_of_tensorflow_is_described(tf_message, expected):
    num_replicas = 1 if tf_message.startswith("x") else 4
    assert finiteness.described(tf_message, num_replicas, 1 if num_replicas == 1 else 2) == expected
