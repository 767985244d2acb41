"""Directory names with special characters as model_dir: save, resume, evaluation, export, logs."""

import string

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.tools import inspect
from small_models import Small, every_step, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SPECIAL = [c for c in string.printable if c.isprintable() and not c.isalnum() and c not in "/."]
ALL_SPECIAL = "".join(SPECIAL)
ALL_KINDS = f"{ALL_SPECIAL}größe-日本-🙂"
NAMES = ["bs=[32]", "lr[1]", "[", "a]", "a\\b", "*", "lr?", ALL_KINDS, "größe-日本-🙂", "a b", "-x", "~"]


def make_trainer(directory, **options):
    return Small("module", "adam", strategy="default", model_dir=str(directory),
                 intervals=every_step(evaluate=ctl.Every(steps=2)), **options)  # fmt: skip


def check(parent, name, capsys):
    (parent / "lr1" / "checkpoints").mkdir(parents=True)  # would match patterns such as lr[1] and lr?
    directory = parent / name
    make_trainer(directory).train(2, export=["saved_model"])
    resumed = make_trainer(directory)
    resumed.train(4)
    assert resumed.step == 4
    expected = Small("module", "adam", strategy="default", writers=[])
    expected.train(4)
    for a, b in zip(weights(resumed), weights(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    evaluated = make_trainer(directory)
    assert evaluated.evaluate() == resumed.evaluate() and evaluated.step == 4
    initialized = make_trainer(parent / "warm", init_from=str(directory))
    initialized.prepare()
    np.testing.assert_array_equal(weights(initialized)[0], weights(resumed)[0])
    assert (directory / "export/saved_model/saved_model.pb").stat().st_size > 0
    events = EventAccumulator(str(directory / "logs/train"))
    events.Reload()
    assert events.Tags()["tensors"] or events.Tags()["scalars"]
    assert inspect.main([str(directory)]) == 0 and "ckpt" in capsys.readouterr().out


@pytest.mark.parametrize("name", some_of(NAMES, ALL_KINDS))
def test_a_model_dir_of_any_name_is_saved_and_resumed(name, tmp_path, capsys):
    check(tmp_path, name, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("character", SPECIAL)
def test_a_model_dir_with_each_special_character(character, tmp_path, capsys):
    check(tmp_path, f"a{character}b", capsys)


def test_a_keras_model_is_exported_to_a_directory_with_special_characters(tmp_path):
    directory = tmp_path / "bs=[32]*?\\"
    trainer = Small(strategy="default", model_dir=str(directory), writers=[])
    trainer.train(1, export=["keras", "saved_model", "weights"])
    loaded = keras.models.load_model(directory / "export" / "model.keras")
    for a, b in zip(loaded.get_weights(), trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert tf.io.gfile.exists(str(directory / "export" / "model.weights.h5"))
