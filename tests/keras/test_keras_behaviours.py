"""Behaviours of Keras's trainer and callbacks: the same in `ctl`, or listed in its guide."""

import pathlib

import ctl
import keras
import numpy as np
import pytest
from conftest import some_of
from keras_behaviours import BEHAVIOURS, OF_CTL, OF_KERAS
from keras_callback_behaviours import REFUSED

GUIDE = (pathlib.Path(__file__).parents[2] / "docs" / "keras.md").read_text()
DIFFERENT = {"limit of steps": "a finite one is repeated"}  # behaviour -> text of the guide
FAST = ["validation in listed epochs", "no variables", "TensorBoard", "BackupAndRestore",
        "a list of callbacks of Keras", "evaluate: stop", "predict: ends of batches",
        "predict: ragged outputs"]  # fmt: skip


def outcome(verbs, name, directory):
    directory.mkdir()
    keras.utils.set_random_seed(1)
    return BEHAVIOURS[name](verbs, directory)


def assert_same(value, expected, path=""):
    """Compares structures; numbers up to rounding."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), path
        for key in expected:
            assert_same(value[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected), f"{path}: {value} instead of {expected}"
        for index, part in enumerate(expected):
            assert_same(value[index], part, f"{path}/{index}")
    elif expected is None or isinstance(expected, (str, bool)):
        assert value == expected, path
    else:
        assert np.shape(value) == np.shape(expected), path
        np.testing.assert_allclose(value, expected, atol=1e-5, rtol=1e-5, err_msg=path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", some_of([n for n in BEHAVIOURS if n not in DIFFERENT], *FAST))
def test_a_behaviour_is_that_of_keras(name, tmp_path):
    expected = outcome(OF_KERAS, name, tmp_path / "keras")
    assert_same(outcome(OF_CTL, name, tmp_path / "ctl"), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DIFFERENT)
def test_the_guide_lists_a_behaviour_that_differs(name, tmp_path):
    expected = outcome(OF_KERAS, name, tmp_path / "keras")
    with pytest.raises(AssertionError):
        assert_same(outcome(OF_CTL, name, tmp_path / "ctl"), expected)
    assert DIFFERENT[name] in " ".join(GUIDE.split())


@pytest.mark.parametrize("name", REFUSED)
def test_the_guide_lists_a_behaviour_that_is_refused(name, tmp_path):
    run, message, text = REFUSED[name]
    with pytest.raises(ctl.UsageError, match=message):
        run(OF_CTL, tmp_path)
    assert text in " ".join(GUIDE.split())


def test_few_behaviours_are_refused():
    assert len(BEHAVIOURS) > 115 and len(REFUSED) <= 15
