"""NaN and infinity: found on every replica before the update, and what each policy makes of them."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.step import finiteness
from small_models import every_step

EXAMPLES, BATCH, BAD = 64, 8, 3  # the bad example is in the fourth batch of the order below


class Poisoned(ctl.Trainer):
    """Linear regression with batch statistics; the example `bad` spoils what `where` says."""

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


def trainer(where, policy, strategy="default", **how):
    kind = type("Kind", (Poisoned,), {"where": where, "policy": policy})
    how = {"intervals": every_step(), "writers": [], **how}
    return kind(strategy=strategy, global_batch_size=BATCH, **how)


def state_of(made):
    return [v.numpy() for v in made._prepared_trainer.state.variables.values()]


@pytest.mark.parametrize("where", ["loss", "gradient", "statistics"])
def test_stop_names_step_and_culprit_and_nothing_bad_was_applied(where):
    made = trainer(where, "stop")
    what = "gradient" if where == "gradient" else "loss"
    with pytest.raises(ctl.NonFiniteError, match=f"Step 4: .*the {what}.* NaN or infinite.*not applied"):
        made.train(8)
    assert made.step == 3 and int(made.optimizer.iterations.numpy()) == 3
    assert all(np.isfinite(w).all() for w in made.model.trainable_variables)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_the_replica_is_named(where, two_replicas):
    made = trainer(where, "stop", two_replicas)
    with pytest.raises(ctl.NonFiniteError, match=f"Step 4: the {where} on replica 1 is NaN"):
        made.train(8)
    assert made.step == 3


def test_the_newest_checkpoint_is_named_and_it_is_from_before(tmp_path):
    made = trainer("loss", "stop", model_dir=tmp_path, intervals=every_step(save=ctl.Every(steps=2)))
    with pytest.raises(ctl.NonFiniteError, match="the newest checkpoint is of step 2"):
        made.train(8)


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
@pytest.mark.parametrize("where", ["loss", "gradient", "statistics"])
def test_a_step_that_is_skipped_leaves_no_trace_but_its_number(where, replicas, two_replicas):
    """As if its batch had not been there: the same as training on the data without it."""
    strategy = two_replicas if replicas == 2 else "default"
    writer = ctl.MemoryWriter()
    made = trainer(where, "skip", strategy, writers=[writer])
    made.train(8)

    class Without(Poisoned):
        def train_data(self, batch_size):
            arrays = super().train_data(batch_size)._arrays
            rest = np.arange(EXAMPLES) // BATCH != BAD
            good = {k: np.asarray(v)[rest] for k, v in arrays.items()}
            return ctl.from_arrays(good, batch_size, shuffle=False)

    Without.where, clean = where, ctl.MemoryWriter()
    other = Without(strategy=strategy, global_batch_size=BATCH, writers=[clean], intervals=every_step())
    other.train(7)
    for a, b in zip(state_of(made)[1:], state_of(other)[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    rows = [values for run, _, values in writer.rows if run == "train"]
    assert [values["skipped_steps"] for values in rows] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert np.isnan(rows[3]["loss"]), "nothing counted in that step"
    kept = [values["loss"] for i, values in enumerate(rows) if i != BAD]
    expected = [values["loss"] for run, _, values in clean.rows if run == "train"]
    np.testing.assert_allclose(kept, expected, rtol=1e-5)
    assert made.step == 8


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
@pytest.mark.parametrize("how", ["accumulate", "in the graph"])
def test_skipping_within_accumulation_and_within_long_loops(how, replicas, two_replicas):
    class Kind(Poisoned):
        policy = "skip"

        def build(self):
            super().build()
            if how == "accumulate":  # TensorFlow has no sums over replicas within its loop
                self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                self.gradients = ctl.Gradients(on_nonfinite="skip", accumulate_steps=2)

    writer = ctl.MemoryWriter()
    intervals = ctl.Intervals(log=ctl.Every(steps=8), save=ctl.Every())
    made = Kind(
        strategy=two_replicas if replicas == 2 else "default", global_batch_size=BATCH,
        intervals=intervals, writers=[writer],
    )  # fmt: skip
    made.train(8)
    ((_, step, values),) = [row for row in writer.rows if row[0] == "train"]
    assert step == 8 and values["skipped_steps"] == 1 / 8 and np.isfinite(values["loss"])
    assert int(made.optimizer.iterations.numpy()) == 7


@pytest.mark.parametrize("hook", [False, True])
def test_rollback_goes_to_the_newest_checkpoint_and_past_the_bad_data(hook, tmp_path, caplog):
    writer = ctl.MemoryWriter()
    how = {"policy": "rollback", **({"after_loop": lambda *_: None} if hook else {})}
    made = type("Kind", (Poisoned,), how)(
        strategy="default", global_batch_size=BATCH, model_dir=tmp_path, writers=[writer],
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    made.train(6)
    rows = [(step, values["loss"]) for run, step, values in writer.rows if run == "train"]
    assert [step for step, _ in rows] == [1, 2, 3, 3, 4, 5, 6], "step 4 failed, from 2 it went on"
    assert any("back to the checkpoint of step 2" in m and "16 examples" in m for m in caplog.messages)

    class Straight(Poisoned):  # the batches 0, 1, 4, 5, 6, 7
        def train_data(self, batch_size):
            arrays = super().train_data(batch_size)._arrays
            rest = ~np.isin(np.arange(EXAMPLES) // BATCH, [2, 3])
            return ctl.from_arrays(
                {k: np.asarray(v)[rest] for k, v in arrays.items()}, batch_size, shuffle=False
            )

    other = Straight(strategy="default", global_batch_size=BATCH, writers=[], intervals=every_step())
    other.train(6)
    for a, b in zip(state_of(made), state_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_went_back_and_is_resumed_goes_on_with_the_right_data(tmp_path):
    intervals = every_step(save=ctl.Every(steps=2))
    whole, rest = ctl.MemoryWriter(), ctl.MemoryWriter()
    for directory, stops, writer in (("a", [7], whole), ("b", [5, 7], rest)):
        for steps in stops:
            trainer("loss", "rollback", model_dir=tmp_path / directory, intervals=intervals,
                    writers=[writer]).train(steps)  # fmt: skip
    assert [r[2]["loss"] for r in whole.rows] == [r[2]["loss"] for r in rest.rows]


def test_without_a_checkpoint_there_is_nothing_to_go_back_to():
    with pytest.raises(ctl.NonFiniteError, match="no checkpoint to roll back to.*save_every_steps"):
        trainer("loss", "rollback").train(8)


def test_going_back_again_and_again_ends(tmp_path):
    class Always(Poisoned):
        policy = "rollback"

        def train_step(self, batch):
            bad = self.step_variable >= 3
            return super().train_step({**batch, "bad": tf.fill(tf.shape(batch["bad"]), bad)})

    made = Always(
        strategy="default", global_batch_size=BATCH, model_dir=tmp_path, writers=[],
        intervals=every_step(save=ctl.Every(steps=2)),
    )  # fmt: skip
    with pytest.raises(ctl.NonFiniteError, match="3 rollbacks to the checkpoint of step 2"):
        made.train(8)


def test_data_that_end_end_earlier_after_going_back(tmp_path):
    made = trainer("loss", "rollback", model_dir=tmp_path, intervals=every_step(save=ctl.Every(steps=2)))
    made.train(epochs=1)
    assert made.step == 6, "8 batches, 2 of them were taken back"


def test_a_policy_of_another_name_is_refused():
    with pytest.raises(ctl.UsageError, match="on_nonfinite is 'ignore'; expected one of stop, skip"):
        ctl.Gradients(on_nonfinite="ignore")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x [1] [0] y", "the loss is NaN or infinite"),
        ("[0 1 0 1] [0 0 0 0]", "the loss on replica 1 (worker 0), 3 (worker 1) is NaN or infinite"),
        ("[0 0 0 0] [0 0 1 0]", "the gradient on replica 2 (worker 1) is NaN or infinite"),
        ("[0 0 0 0] [0 0 0 0]", "the sum of the gradients is NaN or infinite"),
        ("nothing of that kind", "the loss or the gradient is NaN or infinite"),
    ],
)
def test_what_an_error_says_is_told_in_words(text, expected):
    replicas = 1 if text.startswith("x") else 4
    assert finiteness.described(text, replicas, 1 if replicas == 1 else 2) == expected
