"""The first search for devices writes no messages of TensorFlow."""

import contextlib
import subprocess
import sys

import pytest
from conftest import TIMEOUT_SECS, environment
from ctl.tensorflow_patches import quiet_device_search, switches
from patching import parameters_of, restore_original, turn_off
from tensorflow.python.eager import context

FIRST_TENSOR = "import ctl, tensorflow as tf; tf.constant(1)"


@pytest.fixture
def blocks(monkeypatch):
    """A list that contains an entry for each block that was entered, and its context manager."""
    entered = []

    @contextlib.contextmanager
    def quiet():
        entered.append(1)
        yield

    for method in quiet_device_search.METHODS:
        original = restore_original(monkeypatch, context.Context, method)
        assert parameters_of(original) in (["self"], ["self", "reinitialize"])
    return entered, quiet


def test_the_first_call_is_quiet_and_restores_the_method(blocks):
    entered, quiet = blocks
    originals = {method: getattr(context.Context, method) for method in quiet_device_search.METHODS}
    quiet_device_search.quiet_device_search(quiet)
    for method, original in originals.items():
        assert getattr(context.Context, method) is not original
        for _ in range(2):
            getattr(context.context(), method)()
        assert getattr(context.Context, method) is original
    assert len(entered) == len(originals)


def test_it_can_be_turned_off(blocks, monkeypatch):
    turn_off(monkeypatch, "quiet_device_search")
    before = vars(context.Context).copy()
    quiet_device_search.quiet_device_search(blocks[1])
    assert vars(context.Context) == before


@pytest.mark.parametrize("disabled", ["", "quiet_device_search"])
def test_without_the_patch_tensorflow_writes_messages(disabled):
    completed = subprocess.run(
        [sys.executable, "-c", FIRST_TENSOR], env=environment(**{switches.VARIABLE: disabled}),
        capture_output=True, text=True, timeout=TIMEOUT_SECS, check=True,
    )  # fmt: skip
    assert ("cuInit" in completed.stderr) == bool(disabled), completed.stderr
