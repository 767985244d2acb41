"""Precision of the layers of a trainer, compared with a policy that the program sets itself."""

import logging

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import some_of
from small_models import Small

LIBRARIES = {"keras3": keras, "tf_keras": tf_keras}
STEPS = 4


def get_policy(framework):
    if framework == "keras3":
        return keras.config.dtype_policy()
    return tf_keras.mixed_precision.global_policy()


def set_policy(framework, policy):
    if framework == "keras3":
        keras.config.set_dtype_policy(policy)
    else:
        tf_keras.mixed_precision.set_global_policy(policy)


class OwnPolicy(Small):
    """The same model under a policy that `build` sets and resets."""

    def __init__(self, policy="float32", **options):
        super().__init__(writers=[], **options)
        self.policy = policy

    def build(self):
        previous_policy = get_policy(self.framework)
        set_policy(self.framework, self.policy)
        super().build()
        set_policy(self.framework, previous_policy)
        if self.policy == "mixed_float16":
            library = LIBRARIES[self.framework]
            scaled = keras.optimizers if library is keras else tf_keras.mixed_precision
            self.optimizer = scaled.LossScaleOptimizer(self.optimizer)


def train(trainer, steps=STEPS):
    result = trainer.train(steps)
    return result["loss"], [np.asarray(w) for w in trainer.model.get_weights()]


POLICIES = "float32", "mixed_bfloat16", "mixed_float16"
CASES = [(policy, framework) for policy in POLICIES for framework in LIBRARIES]


@pytest.mark.parametrize(
    "case", some_of(CASES, ("mixed_bfloat16", "keras3"), ("mixed_float16", "tf_keras")), ids="-".join
)
def test_the_numbers_are_those_of_a_program_that_sets_the_policy(case):
    policy, framework = case
    loss, weights = train(Small(precision=policy, framework=framework, optimizer="adam", writers=[]))
    expected_loss, expected_weights = train(OwnPolicy(policy, framework=framework, optimizer="adam"))
    assert loss == expected_loss
    for weight, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert get_policy(framework).name == "float32", "the policy of the program is restored"


@pytest.mark.parametrize("policy", some_of(["mixed_bfloat16", "mixed_float16"], "mixed_float16"))
def test_two_replicas_have_the_numbers_of_one_device(policy):
    loss, weights = train(Small(precision=policy, writers=[]))
    options = {"strategy": "mirrored", "num_virtual_devices": 2}
    loss_of_two, weights_of_two = train(Small(precision=policy, writers=[], **options))
    assert loss_of_two == pytest.approx(loss, rel=2e-2)
    for weight, expected in zip(weights_of_two, weights, strict=True):
        np.testing.assert_allclose(weight, expected, atol=2e-2)


def test_bfloat16_applies_to_the_weights_too():
    trainer = Small(precision="bfloat16", writers=[])
    assert np.isfinite(trainer.train(STEPS)["loss"])
    assert {w.dtype for w in trainer.model.weights} == {"bfloat16"}


def test_auto_leaves_the_policy_of_the_program():
    set_policy("keras3", "mixed_bfloat16")
    try:
        trainer = Small(writers=[])
        trainer.prepare()
    finally:
        set_policy("keras3", "float32")
    assert trainer.model.dtype_policy.name == "mixed_bfloat16"


def test_only_mixed_float16_scales_the_loss_and_only_once():
    for policy, is_scaled in [("mixed_bfloat16", False), ("mixed_float16", True)]:
        trainer = Small(precision=policy, writers=[])
        trainer.prepare()
        assert isinstance(trainer.optimizer, keras.optimizers.LossScaleOptimizer) == is_scaled
    trainer = OwnPolicy("mixed_float16", precision="mixed_float16")
    trainer.prepare()
    assert isinstance(trainer.optimizer.inner_optimizer, keras.optimizers.SGD)


class TwoOptimizers(Small):
    """A trainer with an optimizer that `build` has built, and another name for it."""

    def build(self):
        super().build()
        self.optimizer.build(self.model.trainable_variables)
        self.alias = self.optimizer
        self.other_optimizer = keras.optimizers.Adam()
        self.other_optimizer.build(self.model.trainable_variables)


def test_each_optimizer_is_wrapped_once_and_built_if_it_was_built():
    trainer = TwoOptimizers(precision="mixed_float16", writers=[])
    trainer.train(2)
    assert trainer.alias is trainer.optimizer and trainer.optimizer.built
    assert trainer.other_optimizer.built and trainer.other_optimizer.inner_optimizer.built


@pytest.mark.parametrize("collection", [list, lambda items: dict(enumerate(items))])
def test_an_optimizer_without_loss_scale_in_a_collection_is_refused(collection):
    class InCollection(Small):
        def build(self):
            super().build()
            self.optimizers = collection([keras.optimizers.SGD()])

    with pytest.raises(ctl.UsageError, match="self.optimizers contains an optimizer without a loss scale"):
        InCollection(precision="mixed_float16", writers=[]).prepare()


def test_an_optimizer_without_loss_scale_is_refused():
    trainer = Small(precision="mixed_float16", framework="module", writers=[])
    with pytest.raises(ctl.UsageError, match=r"self.optimizer is a PlainOptimizer.*mixed_bfloat16"):
        trainer.prepare()


class KeepsPolicy(Small):
    """A program with a `build` that sets a policy and does not reset it."""

    def build(self):
        set_policy("keras3", "mixed_bfloat16")
        super().build()


def test_a_policy_that_build_sets_is_left_alone_with_a_note(caplog):
    try:
        with caplog.at_level(logging.INFO, "ctl"):
            KeepsPolicy(precision="float32", writers=[]).prepare()
        assert get_policy("keras3").name == "mixed_bfloat16"
    finally:
        set_policy("keras3", "float32")
    assert "build() sets the dtype policy mixed_bfloat16, which replaces precision=float32" in caplog.text
    assert "self.model has mixed_bfloat16" in caplog.text


def test_a_resume_reports_another_precision(tmp_path, caplog):
    train(Small(precision="mixed_bfloat16", model_dir=str(tmp_path), writers=[]))
    unbroken = train(Small(precision="mixed_bfloat16", writers=[]), 2 * STEPS)
    manifest = (tmp_path / "checkpoints" / f"ckpt-{STEPS}" / "manifest.json").read_text()
    assert '"precision": "mixed_bfloat16"' in manifest
    resumed = train(Small(precision="mixed_bfloat16", model_dir=str(tmp_path), writers=[]), 2 * STEPS)
    for weight, expected in zip(resumed[1], unbroken[1], strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert "Settings have changed" not in caplog.text
    with caplog.at_level(logging.WARNING, "ctl"):
        train(Small(precision="float32", model_dir=str(tmp_path), writers=[]), 3 * STEPS)
    assert "precision: mixed_bfloat16 before, float32 now" in caplog.text


CHANGES = [("mixed_float16", "float32"), ("float32", "mixed_float16"), ("float32", "bfloat16")]


@pytest.mark.parametrize("policies", some_of(CHANGES, ("mixed_float16", "float32")), ids="-".join)
def test_a_checkpoint_of_another_precision_is_refused_with_a_hint(policies, tmp_path):
    before, now = policies
    train(Small(precision=before, model_dir=str(tmp_path), writers=[]), 1)
    with pytest.raises(ctl.CheckpointError, match="with the --precision of its run"):
        Small(precision=now, model_dir=str(tmp_path), writers=[]).prepare()


def test_an_unknown_precision_is_refused():
    with pytest.raises(ctl.UsageError, match="precision is 'half'; expected one of auto, float32"):
        Small(precision="half")


def test_predictions_have_the_dtype_of_the_policy():
    trainer = Small(precision="mixed_bfloat16", writers=[])
    assert trainer.predict(np.zeros([3, 8], np.float32)).dtype == tf.bfloat16.as_numpy_dtype
