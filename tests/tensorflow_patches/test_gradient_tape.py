"""Copies of gradient tapes."""

import tensorflow as tf
from ctl.tensorflow_patches import gradient_tape


class Tripling(tf.GradientTape):
    def gradient(self, *args, **kwargs):
        return self.factor * super().gradient(*args, **kwargs)


def test_a_copy_has_the_gradients_and_does_not_stop_the_recording():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = x * x
        copy = gradient_tape.copy_tape(tape, Tripling, factor=3.0)
        assert (tape._recording, copy._recording) == (True, False)
    assert tape._recording is False
    assert copy.gradient(y, x).numpy() == 12.0


def test_a_plain_copy_would_stop_the_recording_of_the_tape():
    with tf.GradientTape() as tape:
        copy = object.__new__(Tripling)
        copy.__dict__.update(tape.__dict__)
        assert copy._recording
