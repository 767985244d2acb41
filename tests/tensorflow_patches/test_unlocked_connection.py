"""The connection of workers releases Python's lock; several processes connect in tests/workers."""

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import unlocked_connection
from patching import turn_off
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context


def test_the_function_of_tensorflow_takes_a_context_and_bytes():
    assert "(arg0: object, arg1: bytes)" in pywrap_tfe.TFE_EnableCollectiveOps.__doc__


def test_it_is_replaced_within_the_block():
    original = pywrap_tfe.TFE_EnableCollectiveOps
    with unlocked_connection.unlocked() as is_replaced:
        assert is_replaced
        assert pywrap_tfe.TFE_EnableCollectiveOps is not original
    assert pywrap_tfe.TFE_EnableCollectiveOps is original


def test_errors_have_the_type_of_tensorflow_s():
    tf.constant(1)
    with unlocked_connection.unlocked(), pytest.raises(tf.errors.InvalidArgumentError):
        pywrap_tfe.TFE_EnableCollectiveOps(context.context()._handle, b"no ServerDef")


def test_it_can_be_turned_off(monkeypatch):
    turn_off(monkeypatch, "unlocked_connection")
    original = pywrap_tfe.TFE_EnableCollectiveOps
    with unlocked_connection.unlocked() as is_replaced:
        assert not is_replaced
        assert pywrap_tfe.TFE_EnableCollectiveOps is original
