"""sync_every on one worker: refused settings, effect, and checkpoints of other settings."""

import logging

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.step.averaging import average
from ctl.step.context import StepContext
from ctl.step.keras_losses import GlobalMeans
from ctl.step.reducers.local_sgd import length_to_average
from ctl.step.reducers.worker_state import WorkerState
from small_models import Small

OUTER = {"sync_every": 2, "outer_learning_rate": 0.5}


class WithEma(Small):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(0.1, use_ema=True)


class Scaled(Small):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


class OwnAverages(Small):
    def moving_averages(self):
        return []


class HalfWire(Small):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(wire_dtype="bfloat16")


@pytest.mark.parametrize(("trainer_class", "settings", "messages"), [
    (Small, {"strategy": "mirrored", "num_virtual_devices": 2}, ["'mirrored' and 2 repl", "multi_worker"]),
    (Small, {"jit_compile": "loop"}, ["sync_every=4 with jit_compile='loop'", "Write 'step'"]),
    (Small, {"on_nonfinite": "rollback"}, ["sync_every=4 with rollback", "on_nonfinite='skip'"]),
    (Small, {"callbacks": [ctl.LossSpike(rollback=True)]}, ["sync_every=4 with rollback"]),
    (WithEma, {}, ["use_ema=True of self.optimizer"]), (Scaled, {}, ["LossScaleOptimizer", "bfloat16"]),
    (OwnAverages, {}, ["moving_averages()"]), (HalfWire, {}, ["round the weights", "--outer_momentum=0.5"]),
])  # fmt: skip
def test_settings_incompatible_with_sync_every_are_refused(trainer_class, settings, messages):
    with pytest.raises(ctl.UsageError) as raised:
        trainer_class(**{"strategy": "default", "sync_every": 4, **settings}).train(1)
    assert all(message in str(raised.value) for message in messages), raised.value


@pytest.mark.parametrize(("settings", "error_pattern"), [
    ({"sync_every": 4, "outer_learning_rate": 0.0}, "a rate > 0"),
    ({"sync_every": 4, "outer_momentum": 1.0}, "a momentum < 1"),
    ({"outer_momentum": 0.9}, "Write --sync_every=16"), ({"sync_every": 0}, "sync_every is 0"),
])  # fmt: skip
def test_an_invalid_outer_optimizer_is_refused_at_once(settings, error_pattern):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        Small(strategy="default", **settings)


def weights_after(steps, **settings):
    trainer = Small(strategy="default", writers=[], **settings)
    trainer.prepare()
    if steps:
        trainer.train(steps)
    return trainer.model.get_weights()


def test_on_one_worker_sync_every_has_no_effect_and_this_is_logged(caplog):
    with caplog.at_level(logging.INFO, "ctl"):
        with_sync_every = weights_after(5, sync_every=4)
    assert "sync_every=4 has no effect on one worker" in caplog.text
    assert all(map(np.array_equal, with_sync_every, weights_after(5)))


def test_on_one_worker_the_outer_rate_scales_the_change_since_the_last_average():
    initial, after_2 = weights_after(0), weights_after(2)
    for start, end, averaged in zip(initial, after_2, weights_after(2, **OUTER), strict=True):
        np.testing.assert_allclose(averaged, (start + end) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("before", "after"), [({}, OUTER), pytest.param(OUTER, {}, marks=pytest.mark.slow)]
)
def test_a_run_resumes_from_a_checkpoint_of_the_other_setting(tmp_path, before, after):
    weights_after(3, model_dir=str(tmp_path), **before)
    resumed = Small(strategy="default", writers=[], model_dir=str(tmp_path), **after)
    resumed.prepare()
    assert resumed.step == 3
    at_3, common = resumed.model.get_weights(), [v.numpy() for v in _common(resumed)]
    assert all(map(np.array_equal, at_3, common)) and len(common) == (4 if after else 0)
    resumed.train(4)


def _common(trainer):
    return getattr(trainer._prepared_trainer.programs.reducer, "_common", [])


def test_a_checkpoint_without_sync_every_has_no_state_of_it(tmp_path):
    weights_after(1, model_dir=str(tmp_path))
    (manifest,) = tmp_path.glob("checkpoints/*/manifest.json")
    assert "sync_every/" not in manifest.read_text()


def test_the_state_of_removed_workers_is_averaged_and_integers_stay():
    strategy = tf.distribute.get_strategy()
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(7, dtype=tf.int64)]
    state = WorkerState(strategy, Small(strategy="default").topology, variables)
    floats, integers = state.variables
    floats.assign([[1.0, 2.0], [3.0, 6.0]])
    integers.assign([[4], [5]])
    assert state.scatter() == 2
    assert variables[0].numpy().tolist() == [2.0, 4.0] and variables[1].numpy() == 7
    assert len(floats.numpy()) == 0, "the memory was not freed"
    state.gather()
    assert floats.numpy().tolist() == [[2.0, 4.0]] and integers.numpy().tolist() == [[7]]


@pytest.mark.parametrize(("step", "length", "expected"), [
    (0, 1, 4), (0, 9, 8), (3, 1, 1), (3, 4, 1), (3, 5, 5), (4, 4, 4), (5, 100, 99),
])  # fmt: skip
def test_loops_end_where_weights_are_averaged(step, length, expected):
    assert length_to_average(step, length, every=4) == expected


def test_a_worker_averages_over_its_own_examples():
    """The value of a worker, times the number of workers, is the mean over the worker's examples."""
    values = tf.constant([[1.0, 2.0], [3.0, 100.0]])
    mask = tf.constant([[True, True], [True, False]])
    context = StepContext(num_local_workers=4)
    local_mean = average(values, global_batch_size=8, mask=mask, context=context)
    assert float(local_mean) * 4 == pytest.approx(2.0)
    assert GlobalMeans(3, 4, is_local=True).everywhere(tf.constant(3.0))[0].numpy() == 12.0
