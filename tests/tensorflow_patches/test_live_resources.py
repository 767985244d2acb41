"""Objects that must stay alive until the process has ended."""

import sys

import tensorflow as tf
from ctl.tensorflow_patches import live_resources
from tensorflow.python.eager import context


def test_the_handles_of_iterators_are_found():
    iterator = iter(tf.data.Dataset.range(3))
    handles = live_resources.resource_handles()
    assert any(handle is iterator._iterator_resource for handle in handles)
    assert all(handle.dtype == tf.resource for handle in handles)


def test_the_context_is_found():
    tf.constant(1)
    assert live_resources.is_context_imported()
    assert live_resources.loaded_context() is context.context()


def test_before_tensorflow_is_imported_there_is_none(monkeypatch):
    monkeypatch.setattr(sys, "modules", {})
    assert not live_resources.is_context_imported()
    assert live_resources.loaded_context() is None
    assert live_resources.resource_handles() == []
