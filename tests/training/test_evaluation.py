"""An evaluation costs no steps: what was trained is saved before it, and learns its numbers afterwards."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.checkpoints import commit
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.retention import Keep
from small_models import Small, every_step, examples

EVERY_2 = {"save": ctl.Every(steps=2), "evaluate": ctl.Every(steps=2)}


class Recording(ChiefOnlyCheckpoints):
    """Notes what was done, in order."""

    def __init__(self, *where, done, **how):
        super().__init__(*where, **how)
        self.done = done

    def save(self, state, manifest):
        self.done.append(f"save {manifest.step}")
        return super().save(state, manifest)

    def amend(self, step, metrics, state):
        self.done.append(f"amend {step}")
        return super().amend(step, metrics, state)


def trainer_of(tmp_path, done, kind=Small, *, keep=Keep(), **how):  # noqa: B008  frozen
    class Noted(kind):
        def eval_data(self, batch_size):
            done.append("evaluate")
            return super().eval_data(batch_size)

    manager = Recording(tmp_path / "checkpoints", done=done, keep=keep)
    return Noted(
        model_dir=str(tmp_path), strategy="default", checkpoints=manager, writers=[],
        intervals=every_step(steps_per_loop=1, **{**EVERY_2, **how}),
    )  # fmt: skip


def manifests(tmp_path):
    return {m.step: m for _, m in commit.list_checkpoints(tmp_path / "checkpoints")}


def test_a_save_comes_before_the_evaluation_of_its_step_and_learns_its_metrics(tmp_path):
    done = []
    means = trainer_of(tmp_path, done).train(4)
    del done[0]  # opened at the start, to find mistakes
    assert done == ["save 2", "evaluate", "amend 2", "save 4", "evaluate", "amend 4"]
    found = manifests(tmp_path)
    assert [found[s].state["pending"] for s in (2, 4)] == [[], []]
    assert found[4].metrics["loss"] == means["eval_loss"] != found[2].metrics["loss"]
    checkpoints = commit.list_checkpoints(tmp_path / "checkpoints")
    assert all(commit.find_damage(path, m) is None for path, m in checkpoints)


def test_a_save_comes_before_an_evaluation_that_is_due_alone(tmp_path):
    done = []
    trainer_of(tmp_path, done, save=ctl.Every()).train(4)
    assert done[1:] == ["save 2", "evaluate", "amend 2", "save 4", "evaluate", "amend 4"]


@pytest.mark.parametrize("kind", [tf.errors.UnavailableError, tf.errors.AbortedError])
@pytest.mark.parametrize("where", ["eval_data", "after_loop"])
def test_what_would_be_a_lost_peer_among_several_costs_one_process_no_step(tmp_path, kind, where):
    class Failing(Small):
        """Its storage is out of reach once two steps are done."""

        def after_loop(self, step, means):
            if where == "after_loop" and step == 2:
                raise kind(None, None, "storage")

        def eval_data(self, batch_size):
            if where == "eval_data" and self.step == 2:
                raise kind(None, None, "storage")
            return super().eval_data(batch_size)

    with pytest.raises(kind):
        trainer_of(tmp_path, [], Failing, save=ctl.Every()).train(4)
    assert sorted(manifests(tmp_path)) == [2]


def test_the_best_is_kept_by_metrics_that_come_after_the_save(tmp_path):
    class Worse(Small):
        """Step by step its loss grows."""

        def eval_step(self, batch):
            scores = super().eval_step(batch)
            return {"loss": scores["loss"] * 0.0 + tf.cast(self.step_variable, tf.float32)}

    trainer_of(tmp_path, [], Worse, keep=Keep(newest=1, best="loss")).train(8)
    assert sorted(manifests(tmp_path)) == [2, 8]


class Drawing(Small):
    """Its evaluation draws from a seed generator that checkpoints hold."""

    def build(self):
        super().build()
        self.seeds = keras.random.SeedGenerator(7)

    def eval_step(self, batch):
        noise = keras.random.normal([], seed=self.seeds)
        return {"loss": super().eval_step(batch)["loss"] * 0.0 + noise}


def test_an_evaluation_that_changes_variables_is_saved_with_them(tmp_path):
    done = []
    trainer_of(tmp_path / "run", done, Drawing).train(2)
    assert done[1:] == ["save 2", "evaluate", "save 2"]
    resumed = trainer_of(tmp_path / "run", [], Drawing).train(4)
    whole = trainer_of(tmp_path / "whole", [], Drawing).train(4)
    assert resumed["eval_loss"] == whole["eval_loss"]


def test_a_failing_evaluation_saves_the_steps_before_it(tmp_path):
    class Failing(Small):
        def eval_data(self, batch_size):
            x, y = examples(seed=5)
            return (
                tf.data.Dataset.from_tensor_slices((x[:13], y[:13])).batch(5).enumerate().map(self.checked)
            )

        def checked(self, number, batch):
            tf.debugging.assert_none_equal(number, tf.constant(2, tf.int64))
            return batch

    trainer = trainer_of(tmp_path, [], Failing, save=ctl.Every())
    with pytest.raises(tf.errors.InvalidArgumentError):
        trainer.train(4)
    [step] = manifests(tmp_path)
    assert step == 2 and manifests(tmp_path)[2].state["pending"] == ["evaluate"]
    assert trainer_of(tmp_path, []).train(4) == trainer_of(tmp_path / "whole", []).train(4)


def test_a_signal_is_heard_within_an_evaluation_which_is_made_up_for(tmp_path):
    import os
    import signal

    class Long(Small):
        signalled = False

        def eval_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples(seed=5)).batch(1).map(self.slow)

        def slow(self, x, y):
            def strike():
                if Long.signalled is None:
                    Long.signalled = True
                    os.kill(os.getpid(), signal.SIGTERM)
                return np.float32(0)

            zero = tf.py_function(strike, [], tf.float32)
            return x + tf.reshape(zero, []), y

    whole = trainer_of(tmp_path / "whole", [], Long, save=ctl.Every()).train(4)
    Long.signalled = None
    with pytest.raises(ctl.Stopped) as stopped:
        trainer_of(tmp_path / "run", [], Long, save=ctl.Every()).train(4)
    assert stopped.value.exit_code == 143 and Long.signalled
    found = manifests(tmp_path / "run")
    assert [*found] == [2] and found[2].state["pending"] == ["evaluate"] and not found[2].metrics
    done = []
    assert trainer_of(tmp_path / "run", done, Long, save=ctl.Every()).train(4) == whole
    assert done[1:] == ["evaluate", "amend 2", "save 4", "evaluate", "amend 4"]


def test_a_failed_evaluation_at_the_end_is_repeated_without_callbacks(tmp_path):
    """A longer run would not have evaluated at step 3, so callbacks get no metrics of it."""

    class Failing(Small):
        def eval_data(self, batch_size):
            if self.step == 3:
                raise ZeroDivisionError
            return super().eval_data(batch_size)

    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, [], Failing).train(3)
    assert manifests(tmp_path)[3].state["pending"] == ["evaluate", "unwatched"]
    callback, done = ctl.MemoryCallback(), []
    trainer = trainer_of(tmp_path, done)
    trainer.callbacks.append(callback)
    trainer.train(4)
    assert done[1:] == ["evaluate", "amend 3", "save 4", "evaluate", "amend 4"]
    assert [step for run, step, _ in callback.seen if run == "eval"] == [4]
