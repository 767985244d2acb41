"""`predict`, `save` and `restore` of a trainer."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import FEATURES, Small, every_step, examples

NEVER = {"log": ctl.Every(), "save": ctl.Every()}


def made(**options):
    return Small(**{"strategy": "default", "intervals": every_step(**NEVER), "writers": [], **options})


def weights(trainer):
    return [v.numpy() for v in trainer.model.variables]


@pytest.mark.parametrize("framework", ["keras3", "tf_keras", "module"])
@pytest.mark.parametrize("rows", some_of([1, 8, 13, 64], 1, 13))
def test_predictions_are_the_model_s_on_any_number_of_replicas(framework, rows, two_replicas):
    x = examples()[0][:rows]
    one, two = (made(framework=framework, strategy=s) for s in ("default", two_replicas))
    expected = None
    for trainer in (one, two):
        found = trainer.predict(x)
        expected = trainer.model(x).numpy() if expected is None else expected
        assert found.shape == (rows, 4)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_predictions_take_datasets_dictionaries_and_several_outputs():
    class Two(Small):
        def build(self):
            inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
            joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
            self.model = keras.Model(inputs, {"sum": keras.layers.Dense(1)(joined), "same": joined})

    a, b = np.ones((5, 2), np.float32), np.arange(5, dtype=np.float32)[:, None]
    trainer = Two(strategy="default")
    found = trainer.predict({"a": a, "b": b})
    assert set(found) == {"sum", "same"} and found["same"][:, 2].tolist() == [0, 1, 2, 3, 4]
    batches = tf.data.Dataset.from_tensor_slices(({"a": a, "b": b}, np.zeros(5))).batch(2)
    np.testing.assert_array_equal(trainer.predict(batches)["sum"], found["sum"])


def test_predicting_again_does_not_trace_again():
    trainer = made()
    trainer.predict(examples()[0][:8])
    traced = trainer._prepared_trainer.programs._predict[1].experimental_get_tracing_count()
    trainer.predict(examples()[0][:8])
    assert trainer._prepared_trainer.programs._predict[1].experimental_get_tracing_count() == traced == 1
    trainer.model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    assert trainer.predict(examples()[0][:8]).shape == (8, 3)


def test_predictions_are_not_those_of_training():
    trainer = made(dropout=0.5)
    x = examples()[0]
    np.testing.assert_array_equal(trainer.predict(x), trainer.predict(x))


@pytest.mark.parametrize(("data", "words"), [
    (None, "needs data"), ("text", "str"), (np.zeros((0, FEATURES)), "examples"),
    (tf.data.Dataset.range(3), "not batched"),
    (tf.data.Dataset.from_tensors(tf.zeros([2, FEATURES])).repeat(), "endless"),
    (ctl.example_numbers(4), "example numbers"),
])  # fmt: skip
def test_data_that_cannot_be_predicted_are_refused(data, words):
    with pytest.raises(ctl.UsageError, match=words):
        made().predict(data)


def test_a_trainer_is_restored_before_it_predicts(tmp_path):
    trained = made(model_dir=tmp_path)
    trained.train(5)
    x = examples()[0]
    np.testing.assert_array_equal(made(model_dir=tmp_path).predict(x), trained.predict(x))


def test_a_checkpoint_of_any_moment_can_be_saved(tmp_path):
    trainer = made(model_dir=tmp_path)
    trainer.prepare()
    trainer.model.layers[0].bias.assign(np.full(trainer.model.layers[0].bias.shape, 7.0))
    assert trainer.save() == str(tmp_path / "checkpoints" / "ckpt-0")
    again = made(model_dir=tmp_path)
    again.prepare()
    assert again.model.layers[0].bias.numpy()[0] == 7.0 and again.step == 0
    again.train(3)  # as the trainer that saved would
    trainer.train(3)
    for one, two in zip(weights(again), weights(trainer), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("background", [False, True])
def test_what_was_changed_after_a_run_is_saved_over_its_checkpoint(tmp_path, background):
    trainer = made(model_dir=tmp_path, background_save=background)
    trainer.train(3)
    trainer.model.layers[0].bias.assign(np.full(trainer.model.layers[0].bias.shape, 7.0))
    assert trainer.save() == str(tmp_path / "checkpoints" / "ckpt-3")
    again = made(model_dir=tmp_path)
    again.prepare()
    assert (again.step, again.model.layers[0].bias.numpy()[0]) == (3, 7.0)


def test_a_save_from_the_hook_comes_at_the_end_of_its_loop_and_resumes_exactly(tmp_path):
    class Saves(Small):
        def after_loop(self, step, means):
            if step in (2, 4):
                assert self.save() is None

    intervals = every_step(log=ctl.Every(steps=4), save=ctl.Every())
    options = {"strategy": "default", "writers": [], "intervals": intervals}
    whole = Saves(model_dir=tmp_path / "a", **options)
    whole.train(7)
    names = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir() if p.name.startswith("ckpt"))
    assert names == ["ckpt-2", "ckpt-4", "ckpt-7"]
    for step in (2, 4):
        writer = ctl.MemoryWriter()
        part = Saves(model_dir=tmp_path / f"from {step}", **{**options, "writers": [writer]})
        assert part.restore(tmp_path / "a" / "checkpoints" / f"ckpt-{step}") == step == part.step
        part.train(7)
        for one, two in zip(weights(part), weights(whole), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/ckpt-3"])
def test_a_trainer_takes_over_a_checkpoint_and_goes_on_from_there(tmp_path, given):
    first, whole = made(model_dir=tmp_path / "run"), made()
    first.train(3)
    whole.train(6)
    other = made(model_dir=tmp_path / "other")
    other.train(1)
    assert other.restore(str(tmp_path / given)) == 3
    other.train(6)
    for one, two in zip(weights(other), weights(whole), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("given", ["nothing", "run/checkpoints/ckpt-9"])
def test_nothing_is_restored_from_where_there_is_nothing(tmp_path, given):
    made(model_dir=tmp_path / "run").train(1)
    trainer = made()
    trainer.prepare()
    before = weights(trainer)
    with pytest.raises(ctl.UsageError, match="there is no checkpoint"):
        trainer.restore(tmp_path / given)
    for one, two in zip(weights(trainer), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    made(model_dir=tmp_path, optimizer="adam").train(1)
    with pytest.raises(ctl.CheckpointError):
        made().restore(tmp_path)


def test_a_trainer_without_a_place_cannot_save_and_one_that_trains_cannot_restore(tmp_path):
    with pytest.raises(ctl.UsageError, match="model_dir"):
        made().save()

    class Restores(Small):
        def after_loop(self, step, means):
            self.restore(tmp_path)

    with pytest.raises(ctl.UsageError, match="during a run"):
        Restores(strategy="default", writers=[]).train(1)
