"""Idle threads of TensorFlow that sleep instead of spinning.

Purpose: Spinning threads of several ranks compete for the cores of a host. The public settings contain no
  option for this.
Replaces: `_config` of `tensorflow.python.eager.context.context()`, which is None until a tensor is created.
Versions: TensorFlow 2.16 and later; a no-op if the attribute does not exist.
Upstream issue: none known.
Switch: `thread_spinning`. Without the patch idle threads spin.
"""

from ctl.tensorflow_patches import switches
from ctl.tensorflow_patches.eager_context import eager_context


def disable_thread_spinning() -> None:
    """Turns off spinning. A no-op if the configuration of the context exists already."""
    import tensorflow as tf

    attributes = vars(eager_context())
    if attributes.get("_config", "missing") is None and switches.is_enabled("thread_spinning"):
        attributes["_config"] = tf.compat.v1.ConfigProto()
        attributes["_config"].experimental.disable_thread_spinning = True
