"""`predict`, `save` and `restore` of a trainer."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import FEATURES, Small, every_step, examples

NO_INTERVALS = {"log": ctl.Every(), "save": ctl.Every()}


def make_trainer(**options):
    return Small(
        **{"strategy": "default", "intervals": every_step(**NO_INTERVALS), "writers": [], **options}
    )


def weights(trainer):
    return [v.numpy() for v in trainer.model.variables]


@pytest.mark.parametrize("framework", ["keras3", "tf_keras", "module"])
@pytest.mark.parametrize("rows", some_of([1, 8, 13, 64], 1, 13))
def test_predictions_are_the_model_s_on_any_number_of_replicas(framework, rows, two_replicas):
    x = examples()[0][:rows]
    single, replicated = (make_trainer(framework=framework, strategy=s) for s in ("default", two_replicas))
    expected = None
    for trainer in (single, replicated):
        predictions = trainer.predict(x)
        expected = trainer.model(x).numpy() if expected is None else expected
        assert predictions.shape == (rows, 4)
        np.testing.assert_allclose(predictions, expected, rtol=1e-6, atol=1e-6)


def test_predictions_take_datasets_dictionaries_and_several_outputs():
    class TwoInputs(Small):
        def build(self):
            inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
            joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
            self.model = keras.Model(inputs, {"sum": keras.layers.Dense(1)(joined), "same": joined})

    a, b = np.ones((5, 2), np.float32), np.arange(5, dtype=np.float32)[:, None]
    trainer = TwoInputs(strategy="default")
    predictions = trainer.predict({"a": a, "b": b})
    assert set(predictions) == {"sum", "same"} and predictions["same"][:, 2].tolist() == [0, 1, 2, 3, 4]
    batches = tf.data.Dataset.from_tensor_slices(({"a": a, "b": b}, np.zeros(5))).batch(2)
    np.testing.assert_array_equal(trainer.predict(batches)["sum"], predictions["sum"])


def test_predicting_again_does_not_trace_again():
    trainer = make_trainer()
    trainer.predict(examples()[0][:8])
    traced = trainer._prepared_trainer.programs._predict[1].experimental_get_tracing_count()
    trainer.predict(examples()[0][:8])
    assert trainer._prepared_trainer.programs._predict[1].experimental_get_tracing_count() == traced == 1
    trainer.model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    assert trainer.predict(examples()[0][:8]).shape == (8, 3)


def test_predictions_are_not_those_of_training():
    trainer = make_trainer(dropout=0.5)
    x = examples()[0]
    np.testing.assert_array_equal(trainer.predict(x), trainer.predict(x))


@pytest.mark.parametrize(("data", "message"), [
    (None, "needs data"), ("text", "str"), (np.zeros((0, FEATURES)), "examples"),
    (tf.data.Dataset.range(3), "not batched"),
    (tf.data.Dataset.from_tensors(tf.zeros([2, FEATURES])).repeat(), "endless"),
    (ctl.example_numbers(4), "example_numbers"),
])  # fmt: skip
def test_data_that_cannot_be_predicted_are_refused(data, message):
    with pytest.raises(ctl.UsageError, match=message):
        make_trainer().predict(data)


def test_a_trainer_is_restored_before_it_predicts(tmp_path):
    trained = make_trainer(model_dir=tmp_path)
    trained.train(5)
    x = examples()[0]
    np.testing.assert_array_equal(make_trainer(model_dir=tmp_path).predict(x), trained.predict(x))


def test_a_checkpoint_of_any_moment_can_be_saved(tmp_path):
    trainer = make_trainer(model_dir=tmp_path)
    trainer.prepare()
    trainer.model.layers[0].bias.assign(np.full(trainer.model.layers[0].bias.shape, 7.0))
    assert trainer.save() == str(tmp_path / "checkpoints" / "ckpt-0")
    restored = make_trainer(model_dir=tmp_path)
    restored.prepare()
    assert restored.model.layers[0].bias.numpy()[0] == 7.0 and restored.step == 0
    restored.train(3)  # like the trainer that saved
    trainer.train(3)
    for restored_value, expected_value in zip(weights(restored), weights(trainer), strict=True):
        np.testing.assert_array_equal(restored_value, expected_value)


@pytest.mark.parametrize("background", some_of([False, True], True))
def test_changes_after_a_run_are_saved_over_its_checkpoint(tmp_path, background):
    trainer = make_trainer(model_dir=tmp_path, background_save=background)
    trainer.train(3)
    trainer.model.layers[0].bias.assign(np.full(trainer.model.layers[0].bias.shape, 7.0))
    assert trainer.save() == str(tmp_path / "checkpoints" / "ckpt-3")
    restored = make_trainer(model_dir=tmp_path)
    restored.prepare()
    assert (restored.step, restored.model.layers[0].bias.numpy()[0]) == (3, 7.0)


def test_a_save_from_the_hook_comes_at_the_end_of_its_loop_and_resumes_exactly(tmp_path):
    class Saves(Small):
        def after_loop(self, step, means):
            if step in (2, 4):
                assert self.save() is None

    intervals = every_step(log=ctl.Every(steps=4), save=ctl.Every())
    options = {"strategy": "default", "writers": [], "intervals": intervals}
    uninterrupted = Saves(model_dir=tmp_path / "a", **options)
    uninterrupted.train(7)
    names = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir() if p.name.startswith("ckpt"))
    assert names == ["ckpt-2", "ckpt-4", "ckpt-7"]
    for step in (2, 4):
        writer = ctl.MemoryWriter()
        resumed = Saves(model_dir=tmp_path / f"from {step}", **{**options, "writers": [writer]})
        assert resumed.restore(tmp_path / "a" / "checkpoints" / f"ckpt-{step}") == step == resumed.step
        resumed.train(7)
        for resumed_value, expected_value in zip(weights(resumed), weights(uninterrupted), strict=True):
            np.testing.assert_array_equal(resumed_value, expected_value)


@pytest.mark.parametrize("directory", some_of(["run", "run/checkpoints", "run/checkpoints/ckpt-3"], "run"))
def test_a_trainer_restores_a_checkpoint_and_resumes_from_it(tmp_path, directory):
    first, uninterrupted = make_trainer(model_dir=tmp_path / "run"), make_trainer()
    first.train(3)
    uninterrupted.train(6)
    other = make_trainer(model_dir=tmp_path / "other")
    other.train(1)
    assert other.restore(str(tmp_path / directory)) == 3
    other.train(6)
    for value, expected_value in zip(weights(other), weights(uninterrupted), strict=True):
        np.testing.assert_array_equal(value, expected_value)


@pytest.mark.parametrize("directory", some_of(["nothing", "run/checkpoints/ckpt-9"], "nothing"))
def test_restore_of_a_missing_checkpoint_changes_no_variable(tmp_path, directory):
    make_trainer(model_dir=tmp_path / "run").train(1)
    trainer = make_trainer()
    trainer.prepare()
    before = weights(trainer)
    with pytest.raises(ctl.UsageError, match="there is no checkpoint"):
        trainer.restore(tmp_path / directory)
    for value, value_before in zip(weights(trainer), before, strict=True):
        np.testing.assert_array_equal(value, value_before)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_trainer(model_dir=tmp_path, optimizer="adam").train(1)
    with pytest.raises(ctl.CheckpointError):
        make_trainer().restore(tmp_path)


def test_save_needs_a_model_dir_and_restore_is_refused_during_training(tmp_path):
    with pytest.raises(ctl.UsageError, match="model_dir"):
        make_trainer().save()

    class Restores(Small):
        def after_loop(self, step, means):
            self.restore(tmp_path)

    with pytest.raises(ctl.UsageError, match="during a run"):
        Restores(strategy="default", writers=[]).train(1)
