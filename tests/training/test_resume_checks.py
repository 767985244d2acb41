"""Checks of the settings when a run resumes: allowed and refused differences."""

import dataclasses

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.training.resume_checks import check_configuration, warn_of_restored_rate
from small_models import Small, examples, weights

BEFORE = Manifest(
    step=5, created=0.0, data={"seed": 0, "source": "10 examples"}, world={"global_batch_size": 8},
    config={"learning_rate": 0.1, "workers": 2},
)  # fmt: skip


def check(*, seed=0, batch=8, source="10 examples", allow=False, before=BEFORE, config=None, **fields):
    settings = ctl.Config(seed=seed, global_batch_size=batch, allow_config_change=allow)
    batches = Batches(
        iterator=None, steps=None, has_unknown_end=False, steps_per_epoch=None, description=source,
        **{"mode": "indexed", **fields},
    )  # fmt: skip
    configuration = {"learning_rate": 0.1, "workers": 2, **(config or {})}
    check_configuration(settings, Topology(), before, batches, configuration)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"batch": 16}, "global_batch_size: 8 before, 16 now"),
        ({"source": "12 examples"}, "train_data: 10 examples before, 12 examples now"),
    ],
)
def test_another_order_of_the_data_is_refused_unless_allowed(changes, difference, caplog):
    with pytest.raises(UsageError, match=difference):
        check(**changes)
    check(**changes, allow=True)
    assert difference in caplog.text


class Seeded(Small):
    """Reads arrays in the order of the seed `order`; None is the seed of the trainer."""

    order = None

    def train_data(self, batch_size):
        return ctl.from_arrays(examples(), batch_size, seed=self.order)


def trained_with_order(order, manager, steps, **options):
    trainer = Seeded(strategy="default", checkpoints=manager, writers=[], **options)
    trainer.order = order
    trainer.train(steps)
    return trainer


@pytest.mark.parametrize("seeds", some_of([(None, 2), (2, 1), (2, None)], (None, 2)), ids=str)
def test_another_seed_of_from_arrays_is_refused_and_both_are_named(seeds):
    first, second = seeds
    manager = ctl.MemoryCheckpoints()
    trained_with_order(first, manager, 2)
    with pytest.raises(UsageError, match=rf"seed of from_arrays.*: {first or 0} before, {second or 0} now"):
        trained_with_order(second, manager, 4)
    assert trained_with_order(second, manager, 4, allow_config_change=True).step == 4


def test_the_same_order_and_a_checkpoint_without_the_seed_of_the_order_are_resumed():
    manager = ctl.MemoryCheckpoints()
    trained_with_order(None, manager, 2)
    assert trained_with_order(0, manager, 4).step == 4
    check(order_seed=5)


def test_another_seed_of_the_trainer_is_named_once():
    before = dataclasses.replace(BEFORE, data=BEFORE.data | {"order_seed": 0})
    with pytest.raises(UsageError) as raised:
        check(seed=1, order_seed=1, before=before)
    assert str(raised.value).count("0 before, 1 now") == 1


GRAIN_STATE = {"iterator": {"batches": 4, "state": "{}"}, "mode": "iterator"}


def test_the_position_of_a_grain_iterator_is_refused_for_other_data(caplog):
    before = dataclasses.replace(BEFORE, data=BEFORE.data | GRAIN_STATE)
    check(before=before, saves_own_position=True)
    difference = "position in train_data: a state of Grain's iterator before, skip now"
    with pytest.raises(UsageError, match=difference):
        check(before=before, mode="skip")
    check(before=before, mode="skip", allow=True)
    assert difference in caplog.text


def test_workers_may_differ_in_number_and_other_settings_are_shown(caplog):
    check(config={"workers": 4})
    assert not caplog.messages
    check(config={"learning_rate": 0.2})
    assert "learning_rate: 0.1 before, 0.2 now" in caplog.text


@pytest.mark.parametrize(
    ("setting", "restored_rate", "is_warned"),
    [(0.2, 0.1, True), (0.2, 0.05, True), (0.1, 0.05, False), (0.2, 0.2, False), (0.2, None, False)],
)
def test_a_changed_learning_rate_without_effect_is_a_warning(setting, restored_rate, is_warned, caplog):
    warn_of_restored_rate(BEFORE, {"learning_rate": setting, "workers": 2}, restored_rate)
    warning = f"learning_rate is {setting} now, but the optimizer continues with the learning rate of the"
    assert (warning in caplog.text) == is_warned


@pytest.mark.workers
def test_a_program_with_another_learning_rate_warns_at_a_resume(run_program, tmp_path):
    command = ["tests/programs/tracking.py", f"--model_dir={tmp_path}", "--global_batch_size=12"]
    options = ["--writers=jsonl", "--export=none", "--train_steps=4"]
    (first,) = run_program(1, [*command, *options, "--save_every_steps=2"])
    assert first.code == 0 and "continues with the learning rate" not in first.output
    (second,) = run_program(1, [*command, *options, "--train_steps=6", "--learning_rate=0.5"])
    assert second.code == 0
    assert "learning_rate is 0.5 now, but the optimizer continues with" in second.output
    assert "of the checkpoint, 0.01. Set self.optimizer.learning_rate in before_training" in second.output


def test_asynchronous_workers_have_no_order_of_examples():
    check(source="10 examples, every batch to one of 3 workers", has_exact_counts=False)


@pytest.mark.parametrize(
    ("before", "one_pass", "is_refused"),
    [("4 batches of 8", False, False), ("4 batches of 8", True, True), ("5 batches of 8", False, True),
     ("4 batches of 9", False, True), ("1,000 batches of 8", False, False),
     ("2 batches of 8", True, False)],
)  # fmt: skip
def test_a_manifest_that_counts_the_batches_of_all_epochs_is_understood(before, one_pass, is_refused):
    data = {"seed": 0, "source": before, **({"one_pass": True} if one_pass else {})}
    manifest = dataclasses.replace(BEFORE, data=data)
    if is_refused:
        with pytest.raises(UsageError, match=f"{before} before, 2 batches of 8 now"):
            check(source="2 batches of 8", before=manifest)
    else:
        check(source="2 batches of 8", before=manifest)


@pytest.mark.parametrize("position", some_of(["skip", "iterator"], "iterator"))
@pytest.mark.parametrize(
    "first", [{"steps": 3}, pytest.param({"epochs": 1}, marks=pytest.mark.slow), {"epochs": 2}]
)
def test_a_finite_dataset_is_trained_for_more_epochs_than_before(position, first, tmp_path):
    class Finite(Small):
        def train_data(self, batch_size):
            x, y = examples()
            data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=1).batch(batch_size)
            return data.take(2)

    def trained(directory, **length):
        trainer = Finite("module", strategy="default", data_position=position, model_dir=directory)
        trainer.train(**length)
        return trainer

    unbroken = trained(None, epochs=3)
    trained(str(tmp_path), **first)
    if position == "iterator" and "steps" in first:
        with pytest.raises(UsageError, match="iterator of another pipeline.*give epochs if that run had"):
            trained(str(tmp_path), epochs=3)
        return
    resumed = trained(str(tmp_path), epochs=3)
    assert resumed.step == unbroken.step == 6
    for a, b in zip(weights(resumed), weights(unbroken), strict=True):
        np.testing.assert_array_equal(a, b)
