"""Errors from calls of graphs and sessions are translated."""

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import graph_call_errors
from patching import parameters_of, restore_original, turn_off
from tensorflow.python.client import session
from tensorflow.python.eager import context


class TranslatedError(Exception):
    """Error in place of TensorFlow's."""


def translate(error):
    return TranslatedError(type(error).__name__) if "from Python" in str(error) else error


def failing():
    raise RuntimeError("from Python")


def call_function():
    tf.function(lambda: tf.py_function(failing, [], tf.float32))()


def call_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        running.run(tf.py_function(failing, [], tf.float32))


@pytest.fixture(autouse=True)
def originals(monkeypatch):
    call = restore_original(monkeypatch, context.Context, "call_function")
    run = restore_original(monkeypatch, session.BaseSession, "_do_call")
    assert parameters_of(call) == ["self", "name", "tensor_inputs", "num_outputs"]
    assert parameters_of(run) == ["self", "fn", "args"]


@pytest.mark.parametrize("call", [call_function, call_session])
def test_without_the_patch_the_type_is_lost(call, monkeypatch):
    turn_off(monkeypatch, "graph_call_errors")
    graph_call_errors.translate_graph_errors(translate)
    with pytest.raises(tf.errors.UnknownError):
        call()


@pytest.mark.parametrize("call", [call_function, call_session])
def test_errors_are_translated_once(call):
    for _ in range(2):
        graph_call_errors.translate_graph_errors(translate)
    with pytest.raises(TranslatedError, match="UnknownError"):
        call()


def test_other_errors_are_unchanged():
    graph_call_errors.translate_graph_errors(translate)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda: tf.gather([1, 2], tf.constant(5)))()
