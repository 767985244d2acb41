"""Idle threads of TensorFlow sleep."""

import pytest
from ctl.tensorflow_patches import thread_spinning
from patching import turn_off
from tensorflow.python.eager import context


@pytest.fixture
def new_context(monkeypatch):
    """A context that has not been configured."""
    new = context.Context()
    monkeypatch.setattr(thread_spinning, "eager_context", lambda: new)
    return new


def test_the_configuration_of_a_new_context_is_replaced(new_context):
    assert not new_context.config.experimental.disable_thread_spinning
    assert vars(new_context)["_config"] is None
    thread_spinning.disable_thread_spinning()
    assert new_context.config.experimental.disable_thread_spinning


def test_it_can_be_turned_off(new_context, monkeypatch):
    turn_off(monkeypatch, "thread_spinning")
    thread_spinning.disable_thread_spinning()
    assert vars(new_context)["_config"] is None
