"""Seeds: the same on every worker, with different dropout masks on each replica.

Keras 3 keeps the state of a seed generator equal on all replicas, so all would draw the same masks. Here
the drawn seed is shifted by the number of the replica. The state stays equal and is saved in checkpoints.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import is_keras3, layers_of
from ctl.tensorflow_patches import seed_generators


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras."""
    tf.keras.utils.set_random_seed(seed)


@dataclass(frozen=True)
class GeneratorStates:
    """States of the global generators of Python and NumPy."""

    python: Any
    numpy: Any

    @classmethod
    def current(cls) -> "GeneratorStates":
        """Returns the states of the generators of this process."""
        return cls(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Continues both generators from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def differ_by_replica(objects: Any) -> None:
    """Makes the Keras 3 seed generators in `objects` draw different seeds on each replica."""
    for generator in _generators(objects):
        seed_generators.shift_seeds(generator)


def _generators(objects: Any) -> list:
    """Returns the distinct Keras 3 seed generators of models, layers, and collections of them."""
    generator_by_id: dict[int, Any] = {}
    stack = [objects]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
        elif is_keras3(item) and type(item).__name__ == "SeedGenerator":
            generator_by_id[id(item)] = item
        elif is_keras3(item):
            for layer in layers_of(item):
                stack += seed_generators.generators_of(layer)
    return list(generator_by_id.values())
