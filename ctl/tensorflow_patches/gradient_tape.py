"""A copy of a gradient tape that does not record.

Purpose: `hvd.DistributedGradientTape` is a subclass with the attributes of the user's tape. Only the
  original tape stops the recording.
Uses: `tf.GradientTape._recording`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: none; without the assignment both tapes would stop the same recording.
"""

from typing import Any

import tensorflow as tf


def copy_tape(tape: tf.GradientTape, tape_class: type, **attributes: Any) -> Any:
    """Returns a `tape_class` with the attributes of the tape and additional ones, which does not record."""
    copy: Any = object.__new__(tape_class)
    copy.__dict__.update(tape.__dict__)
    copy.__dict__.update(attributes)
    copy._recording = False
    return copy
