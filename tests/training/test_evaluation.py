"""Checkpoints around an evaluation: saved before it, and amended with its metrics afterwards."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints import commit
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.retention import Keep
from ctl.training.evaluation_observer import EvaluationObserver
from small_models import Small, every_step, examples

ERRORS = tf.errors.UnavailableError, tf.errors.AbortedError
EVERY_2 = {"save": ctl.Every(steps=2), "evaluate": ctl.Every(steps=2)}


class Recording(ChiefOnlyCheckpoints):
    """A checkpoint manager that records its calls."""

    def __init__(self, *args, calls, **options):
        super().__init__(*args, **options)
        self.calls = calls

    def save(self, state, manifest):
        self.calls.append(f"save {manifest.step}")
        return super().save(state, manifest)

    def amend(self, step, metrics, state):
        self.calls.append(f"amend {step}")
        return super().amend(step, metrics, state)


def trainer_of(tmp_path, calls, trainer_class=Small, *, keep=Keep(), **intervals):  # noqa: B008  frozen
    class Recorded(trainer_class):
        def eval_data(self, batch_size):
            calls.append("evaluate")
            return super().eval_data(batch_size)

    manager = Recording(tmp_path / "checkpoints", calls=calls, keep=keep)
    return Recorded(
        model_dir=str(tmp_path), strategy="default", checkpoints=manager, writers=[],
        intervals=every_step(steps_per_loop=1, **{**EVERY_2, **intervals}),
    )  # fmt: skip


def manifests(tmp_path):
    return {m.step: m for _, m in commit.list_checkpoints(tmp_path / "checkpoints")}


def test_a_checkpoint_is_saved_before_the_evaluation_and_amended_with_its_metrics(tmp_path):
    calls = []
    means = trainer_of(tmp_path, calls).train(4)
    del calls[0]  # the validation opens the data at the start
    assert calls == ["save 2", "evaluate", "amend 2", "save 4", "evaluate", "amend 4"]
    saved = manifests(tmp_path)
    assert [saved[s].state["pending"] for s in (2, 4)] == [[], []]
    assert saved[4].metrics["loss"] == means["eval_loss"] != saved[2].metrics["loss"]
    checkpoints = commit.list_checkpoints(tmp_path / "checkpoints")
    assert all(commit.find_damage(path, m) is None for path, m in checkpoints)


def test_a_checkpoint_is_saved_before_an_evaluation_without_a_due_save(tmp_path):
    calls = []
    trainer_of(tmp_path, calls, save=ctl.Every()).train(4)
    assert calls[1:] == ["save 2", "evaluate", "amend 2", "save 4", "evaluate", "amend 4"]


@pytest.mark.parametrize("error_class", some_of(ERRORS, tf.errors.UnavailableError))
@pytest.mark.parametrize("where", ["eval_data", "after_loop"])
def test_a_tensorflow_error_of_a_single_process_loses_no_step(tmp_path, error_class, where):
    class Failing(Small):
        """A trainer that raises a storage error after two steps."""

        def after_loop(self, step, means):
            if where == "after_loop" and step == 2:
                raise error_class(None, None, "storage")

        def eval_data(self, batch_size):
            if where == "eval_data" and self.step == 2:
                raise error_class(None, None, "storage")
            return super().eval_data(batch_size)

    with pytest.raises(error_class):
        trainer_of(tmp_path, [], Failing, save=ctl.Every()).train(4)
    assert sorted(manifests(tmp_path)) == [2]


def test_the_best_is_kept_by_metrics_added_after_the_save(tmp_path):
    class Worse(Small):
        """A trainer with a loss that grows with every step."""

        def eval_step(self, batch):
            scores = super().eval_step(batch)
            return {"loss": scores["loss"] * 0.0 + tf.cast(self.step_variable, tf.float32)}

    trainer_of(tmp_path, [], Worse, keep=Keep(newest=1, best="loss")).train(8)
    assert sorted(manifests(tmp_path)) == [2, 8]


class Drawing(Small):
    """A trainer that evaluates with a seed generator; checkpoints contain the generator."""

    def build(self):
        super().build()
        self.seeds = keras.random.SeedGenerator(7)

    def eval_step(self, batch):
        noise = keras.random.normal([], seed=self.seeds)
        return {"loss": super().eval_step(batch)["loss"] * 0.0 + noise}


def test_an_evaluation_that_changes_variables_is_saved_with_them(tmp_path):
    calls = []
    trainer_of(tmp_path / "run", calls, Drawing).train(2)
    assert calls[1:] == ["save 2", "evaluate", "save 2"]
    resumed = trainer_of(tmp_path / "run", [], Drawing).train(4)
    unbroken = trainer_of(tmp_path / "whole", [], Drawing).train(4)
    assert resumed["eval_loss"] == unbroken["eval_loss"]


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


@pytest.mark.slow  # a failing evaluation is repeated in the same way
def test_a_signal_interrupts_an_evaluation_which_is_repeated_after_a_resume(tmp_path):
    import os
    import signal

    class Long(Small):
        signalled = False

        def eval_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples(seed=5)).batch(1).map(self.slow)

        def slow(self, x, y):
            def send_signal():
                if Long.signalled is None:
                    Long.signalled = True
                    os.kill(os.getpid(), signal.SIGTERM)
                return np.float32(0)

            zero = tf.py_function(send_signal, [], tf.float32)
            return x + tf.reshape(zero, []), y

    unbroken = trainer_of(tmp_path / "whole", [], Long, save=ctl.Every()).train(4)
    Long.signalled = None
    with pytest.raises(ctl.Stopped) as stopped:
        trainer_of(tmp_path / "run", [], Long, save=ctl.Every()).train(4)
    assert stopped.value.exit_code == 143 and Long.signalled
    saved = manifests(tmp_path / "run")
    assert [*saved] == [2] and saved[2].state["pending"] == ["evaluate"] and not saved[2].metrics
    calls = []
    assert trainer_of(tmp_path / "run", calls, Long, save=ctl.Every()).train(4) == unbroken
    assert calls[1:] == ["evaluate", "amend 2", "save 4", "evaluate", "amend 4"]


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
    callback, calls = ctl.MemoryCallback(), []
    trainer = trainer_of(tmp_path, calls)
    trainer.callbacks.append(callback)
    trainer.train(4)
    assert calls[1:] == ["evaluate", "amend 3", "save 4", "evaluate", "amend 4"]
    assert [step for run, step, _ in callback.seen if run == "eval"] == [4]


def test_an_observer_without_methods_does_not_change_an_evaluation():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plain, observed = (
        ctl.KerasTrainer(model, train=None, validation=examples(), global_batch_size=8, writers=[])
        for _ in range(2)
    )
    observed.observe_evaluations(EvaluationObserver(2))
    assert observed.evaluate() == pytest.approx(plain.evaluate(), rel=1e-6)
