"""Updates that begin while gradients still travel in buckets: replicas agree that sums will be finite.

A replica promises that its gradients are too small to overflow in any sum, or in the global norm. Where
one cannot, all wait for the sums and look at these, as without buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.collectives.engine import Engine
from ctl.distribute.engine_all_reduce import bucket_bytes_of, engine_of, sum_ahead, wire_dtype_of
from ctl.step.buckets import in_buckets

_LARGEST_SQUARES = 1e36  # of the global norm of the sum; float32 ends at 3e38
_LARGEST_FLOAT16 = 6e4


@dataclass(frozen=True)
class EarlyUpdate:
    """What a replica knows of its gradients before their sum.

    Attributes:
      squares: `[]` float32, the sum of the squares of all elements.
      largest: of squares that cannot overflow in a sum.
    """

    squares: tf.Tensor
    largest: float
    engine: Engine

    @classmethod
    def of(
        cls, strategy: tf.distribute.Strategy, gradients: Sequence[Any], wire_dtype: str | None
    ) -> "EarlyUpdate | None":
        """None where gradients do not travel in several buckets, or one of them is sparse."""
        engine = engine_of(strategy)
        if engine is None or any(isinstance(g, tf.IndexedSlices) for g in gradients):
            return None
        if len(in_buckets(gradients, bucket_bytes_of(strategy))) < 2:
            return None
        squares = 2.0 * tf.add_n([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in gradients])
        # the norm of a sum is at most the sum of the norms, and no element is larger than the norm
        is_narrow = wire_dtype_of(strategy, wire_dtype) == "float16"
        largest = _LARGEST_FLOAT16**2 if is_narrow else _LARGEST_SQUARES
        return cls(squares, largest / strategy.num_replicas_in_sync**2, engine)

    def agreed(self, loss_flag: tf.Tensor) -> tf.Tensor:
        """`[]` bool, the same on all replicas: losses, sums and their norm will be finite.

        Called after the sums: what has an effect runs in the order of the program, and would delay them.
        """
        is_fine = (self.squares <= self.largest) & (loss_flag <= 0.0)
        return sum_ahead(self.engine, 1.0 - tf.cast(is_fine, tf.float32)) <= 0.0
