"""Seed generators of Keras 3 that draw different seeds on each replica.

Purpose: Keras keeps the state of a seed generator equal on all replicas, so all would draw the same dropout
  masks. The drawn seed is shifted by the number of the replica; the state stays equal.
Replaces: `next` of single `keras.random.SeedGenerator` objects; reads `_seed_generators` of layers, and
  "global_seed_generator" of `keras.src.backend.common.global_state`.
Versions: Keras 3.0 and later.
Upstream issue: none known.
Switch: `seed_generators`. Without the patch all replicas draw equal masks.
"""

import importlib
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_SHIFT = 0x1E3779B1  # odd and large: seeds of neighbouring replicas have no pattern in common


def generators_of(layer: Any) -> list[Any]:
    """Returns the seed generators that a layer has created itself."""
    return list(getattr(layer, "_seed_generators", ()))


def global_generator() -> Any:
    """Returns the seed generator of `keras.random` without a seed, or None if it does not exist."""
    try:
        global_state: Any = importlib.import_module("keras.src.backend.common.global_state")
    except ImportError:
        return None
    return global_state.get_global_attribute("global_seed_generator")


def shift_seeds(generator: Any) -> None:
    """Makes a generator add a shift to each drawn seed, by the number of the replica."""
    if switches.is_enabled("seed_generators"):
        object.__setattr__(generator, "next", _shifted(generator.next))


def _shifted(draw: Any) -> Any:
    def next_for_replica(ordered: bool = True) -> Any:
        seed = draw(ordered=ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        number = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([number * tf.cast(_SHIFT, seed.dtype), number * 0])

    return next_for_replica
