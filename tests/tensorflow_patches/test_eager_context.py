"""State of TensorFlow's eager context that has no public function."""

import tensorflow as tf
from ctl.tensorflow_patches import eager_context
from tensorflow.python.eager import context
from tensorflow.python.framework import config


def test_a_context_is_initialized_by_the_first_tensor():
    tf.constant(1.0)
    assert eager_context.is_context_initialized()
    assert context.Context()._initialized is False


def test_the_question_creates_no_context(monkeypatch):
    monkeypatch.setattr(context, "_context", None)
    assert not eager_context.is_context_initialized() and context._context is None


def test_the_global_seed_and_the_position_in_its_sequence_are_restored():
    tf.random.set_seed(7)
    first = tf.random.uniform([]).numpy()
    with eager_context.tensorflow_seed_kept():
        tf.random.set_seed(8)
        assert eager_context.global_seed() == 8
        tf.random.uniform([])
    assert eager_context.global_seed() == 7
    second = tf.random.uniform([]).numpy()
    tf.random.set_seed(7)
    assert [tf.random.uniform([]).numpy(), tf.random.uniform([]).numpy()] == [first, second]


def test_without_the_position_the_sequence_begins_again():
    tf.random.set_seed(7)
    first = tf.random.uniform([]).numpy()
    tf.random.set_seed(7)
    assert tf.random.uniform([]).numpy() == first


def test_determinism_is_read():
    assert not eager_context.is_op_determinism_enabled()
    config.enable_op_determinism()
    try:
        assert eager_context.is_op_determinism_enabled()
    finally:
        config.disable_op_determinism()
