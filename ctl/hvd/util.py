"""Names that scripts written for Horovod import from its module of this name."""

import tensorflow as tf


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _has_eager() -> bool:
    return True


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def _make_subgraph(f):
    return tf.function(f)
