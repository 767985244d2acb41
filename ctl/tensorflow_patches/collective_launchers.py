"""Launchers of the collectives of a MultiWorkerMirroredStrategy.

Purpose: `communication="tcp"` runs the collectives of a strategy on the engine of `ctl.collectives`.
Replaces: `_launchers` of the strategy's `extended._cross_device_ops` and `extended._host_cross_device_ops`.
  A replacement has the methods of `cross_device_utils.CollectiveReplicaLauncher`.
Versions: TensorFlow 2.16 and later. Without the attributes, `communication="auto"` keeps TensorFlow's ring.
Upstream issue: none known.
Switch: `collective_launchers`. Without the patch "auto" keeps the ring, and "tcp" raises UsageError.
"""

from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_ATTRIBUTES = ("_cross_device_ops", "_host_cross_device_ops")


def can_replace_launchers(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if the strategy has launchers."""
    return bool(_owners(strategy)) and switches.is_enabled("collective_launchers")


def replace_launchers(strategy: tf.distribute.Strategy, launcher: Any) -> None:
    """Makes the strategy call `launcher`, or its original launchers if that is None."""
    for owner in _owners(strategy):
        if not hasattr(owner, "_ctl_own_launchers"):
            owner._ctl_own_launchers = owner._launchers
        owner._launchers = owner._ctl_own_launchers if launcher is None else [launcher]


def _owners(strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns the objects with the launchers; an empty list if this TensorFlow has none."""
    owners = [getattr(strategy.extended, name, None) for name in _ATTRIBUTES]
    return owners if all(hasattr(owner, "_launchers") for owner in owners) else []
