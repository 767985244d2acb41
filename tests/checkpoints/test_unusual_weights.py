"""Warm start from files that tf.compat.v1 has written, unreadable ones, and models that share a layer."""

import errno
import itertools
import logging
import zipfile

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small, every_step, weights

OPTIONS = dict(strategy="default", writers=[], intervals=every_step())
SHAPES = {"body/kernel": (8, 16), "body/bias": (16,), "head/kernel": (16, 4), "head/bias": (4,)}
UNREADABLE = tf.errors.UnknownError(None, None, "/d/a.index; Input/output error")


class Named(Small):
    """Trains a model with names of layers that the user has chosen."""

    def build(self):
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, name="body"), layers.Dense(4, name="head")]
        )
        self.optimizer = keras.optimizers.SGD(0.1)


def prepared(source):
    trainer = Named(init_from=str(source), **OPTIONS)
    trainer.prepare()
    return trainer


def test_a_checkpoint_of_a_saver_is_matched_by_names_without_slots_and_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ctl")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        generator = np.random.default_rng(1)
        expected = [generator.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]
        for (name, shape), value in zip(SHAPES.items(), expected, strict=True):
            tf.compat.v1.get_variable(name, initializer=value)
            tf.compat.v1.get_variable(f"{name}/Adam", initializer=np.zeros(shape, np.float32))
        tf.compat.v1.get_variable("global_step", initializer=np.int64(7))
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver().save(
            session, str(tmp_path / "model.ckpt"), write_meta_graph=False
        )
    for actual, value in zip(prepared(path).model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(actual, value)
    [message] = [r.getMessage() for r in caplog.records if "--init_from" in r.getMessage()]
    assert "matched 4 of 4 variables; not matched: none" in message


def test_a_directory_whose_file_names_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "checkpoint").write_text("last_preserved_timestamp: 1.0\n")
    with pytest.raises(ctl.UsageError, match="checkpoint names no checkpoint; expected a line") as raised:
        prepared(tmp_path)
    assert raised.value.exit_code == 2


def test_an_archive_without_weights_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(ctl.CheckpointError, match="cannot be read: the archive has no .h5 file"):
        prepared(tmp_path / "a.keras")


@pytest.mark.parametrize("file_type", ["keras", "checkpoint"])
@pytest.mark.parametrize("is_permanent", [False, True])
def test_an_input_output_error_is_retried_and_is_no_damage(tmp_path, monkeypatch, file_type, is_permanent):
    named = Named(**OPTIONS)
    named.prepare()
    source = tmp_path / "a.keras"
    named.model.save(source)
    owner, function = type(source), "read_bytes"
    if file_type == "checkpoint":
        source = tf.train.Checkpoint(model=named.model).write(str(tmp_path / "a"))
        owner, function = tf.train, "load_checkpoint"
    num_failures, read = itertools.count(), getattr(owner, function)

    def failing(path):
        if str(path).startswith(str(tmp_path)) and (next(num_failures) == 0 or is_permanent):
            raise OSError(errno.EIO, "Input/output error") if file_type == "keras" else UNREADABLE
        return read(path)

    monkeypatch.setattr(owner, function, failing)
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    if is_permanent:
        with pytest.raises(ctl.CheckpointError, match="cannot be read: .*Input/output error") as raised:
            prepared(source)
        assert raised.value.exit_code == 134
    else:
        for actual, expected in zip(weights(prepared(source)), weights(named), strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert next(num_failures) > 1


class Shared(Small):
    """Two models with a common layer."""

    def build(self):
        body = keras.layers.Dense(16, name="body")
        self.model = keras.Sequential([keras.Input((8,)), body, keras.layers.Dense(4, name="head")])
        self.other = keras.Sequential([keras.Input((8,)), body])
        self.optimizer = keras.optimizers.SGD(0.1)


def test_different_saved_values_of_a_shared_layer_are_refused(tmp_path):
    models = [Shared(**OPTIONS) for _ in range(2)]
    for trainer in models:
        trainer.prepare()
    saved = tf.train.Checkpoint(model=models[0].model, other=models[1].other).write(str(tmp_path / "a"))
    with pytest.raises(ctl.CheckpointError, match="body/kernel may be model/.* or other/"):
        Shared(init_from=saved, **OPTIONS).prepare()
    saved = tf.train.Checkpoint(model=models[0].model, other=models[0].other).write(str(tmp_path / "b"))
    trainer = Shared(init_from=saved, **OPTIONS)
    trainer.prepare()
    np.testing.assert_array_equal(trainer.other(np.ones([1, 8])), models[0].other(np.ones([1, 8])))
