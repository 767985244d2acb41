"""Names that scripts import from `horovod.tensorflow.util` or `horovod.common.util`."""

from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _has_eager() -> bool:
    return True


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Returns True if TensorFlow has a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns True if version "2.21.0" is at least `target`. Raises ValueError for other types."""
    from packaging.version import parse

    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"got {ver!r} and {target!r}; expected two version strings such as '2.21.0'.")
    return parse(ver) >= parse(target)


def _make_subgraph(f: Any) -> Any:
    return tf.function(f)
