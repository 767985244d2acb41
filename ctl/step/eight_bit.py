"""Sums of gradients that travel with 8 bits per number (`wire_dtype="int8"`).

A block of 256 numbers has one scale, its largest absolute value (Dettmers 2016, arXiv:1511.04561). What
rounding leaves out is added to the gradient of the next step (error feedback: Seide et al. 2014;
Karimireddy et al. 2019, arXiv:1901.09847; of the sum as well: Tang et al. 2019, arXiv:1905.05957).

    x = gradient + left over
    tcp     part r of x goes, encoded, to worker r, which adds the parts up and sends the sum, encoded, to
            all; left over is what encoding x has lost, and of part r what encoding the sum has lost
    others  all of x goes, encoded, to all workers; left over is what encoding x has lost
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.engine_all_reduce import all_to_all, engine_of
from ctl.distribute.keras_objects import plain
from ctl.distribute.topology import Topology
from ctl.step.worker_state import WorkerState, variable_like

BLOCK = 256  # numbers with one scale
_LEAST = 4096  # numbers; what is smaller travels as it is
_WORDS = BLOCK // 4  # int32, as TensorFlow's collectives take no int8
_ALL_BUT_ZERO = 1e-30  # the largest of a block that counts as zeros


def encoded(numbers: tf.Tensor) -> tf.Tensor:
    """`[n, 256]` float32 -> `[n, 65]` int32: 256 whole numbers of 8 bits and a float32 scale per block.

    Of a block with what is not finite nothing is right.
    """
    scales = tf.reduce_max(tf.abs(numbers), axis=1, keepdims=True)
    scales = tf.where(scales > _ALL_BUT_ZERO, scales, 0.0)
    codes = tf.cast(tf.round(numbers * tf.math.divide_no_nan(127.0, scales)), tf.int8)
    words = tf.bitcast(tf.reshape(codes, [-1, _WORDS, 4]), tf.int32)
    return tf.concat([words, tf.bitcast(scales, tf.int32)], axis=1)


def decoded(words: tf.Tensor) -> tf.Tensor:
    """What `encoded` has made, as `[n, 256]` float32."""
    codes = tf.reshape(tf.bitcast(words[:, :_WORDS], tf.int8), [-1, BLOCK])
    return tf.cast(codes, tf.float32) * (tf.bitcast(words[:, _WORDS:], tf.float32) / 127.0)


class EightBitSums:
    """Sums the gradients of `weights` over workers with one replica each.

    Args:
      weights: variables of the strategy; the small ones are left to others.

    Attributes:
      state: what is left over, for checkpoints.
    """

    def __init__(self, strategy: tf.distribute.Strategy, topology: Topology, weights: Sequence[Any]):
        self._strategy, self._topology = strategy, topology
        large = [v for v in map(plain, weights) if (v.shape.num_elements() or 0) >= _LEAST]
        own = [variable_like(strategy.experimental_local_results(v)[0], "left_over") for v in large]
        self._left = dict(zip(map(id, large), own, strict=True))
        self.state = WorkerState(strategy, topology, own)

    def begin(self) -> None:
        """Takes over what was restored; other workers than those of the checkpoint share what it has."""
        rows, workers = self.state.scatter(), self.state.num_workers
        if rows != workers:
            for variable in self._left.values():
                variable.assign(variable * (rows / workers))

    def takes(self, gradient: Any, variable: Any) -> bool:
        """Whether `summed` is for this gradient."""
        return not isinstance(gradient, tf.IndexedSlices) and id(plain(variable)) in self._left

    def summed(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list, list]:
        """In replica context: the sums, the same on all workers, and pairs for `keep_left_over`."""
        left = [self._left[id(plain(v))] for v in variables]
        shapes, sizes = [v.shape for v in left], [v.shape.num_elements() for v in left]
        parts = [tf.reshape(tf.cast(g, tf.float32) + v, [-1]) for g, v in zip(gradients, left, strict=True)]
        count, total = self._topology.num_workers, sum(sizes)
        rows = math.ceil(total / (count * BLOCK))  # of one worker's part
        empty = tf.zeros([rows * count * BLOCK - total])
        numbers = tf.reshape(tf.concat([*parts, empty], axis=0), [-1, BLOCK])
        sums, lost = self._exchanged(numbers, rows)

        def like_gradients(flat: tf.Tensor) -> list:
            pieces = tf.split(tf.reshape(flat, [-1])[:total], sizes)
            return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]

        kept = list(zip(left, like_gradients(lost), strict=True))
        return [tf.cast(s, g.dtype) for s, g in zip(like_gradients(sums), gradients, strict=True)], kept

    def _exchanged(self, numbers: tf.Tensor, rows: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The sum over workers, and what encoding has lost here."""
        count, rank = self._topology.num_workers, self._topology.worker_index
        sent = encoded(numbers)
        lost = numbers - decoded(sent)
        if engine_of(self._strategy) is None:
            came = decoded(self.gathered(sent, count))
            return tf.reduce_sum(tf.reshape(came, [count, -1, BLOCK]), axis=0), lost
        came = decoded(self.exchanged(sent, self._strategy))
        mine = tf.reduce_sum(tf.reshape(came, [count, rows, BLOCK]), axis=0)
        part = encoded(mine)
        lost += tf.pad(mine - decoded(part), [[rank * rows, (count - 1 - rank) * rows], [0, 0]])
        return decoded(self.gathered(part, count)), lost

    @staticmethod
    def exchanged(rows: tf.Tensor, strategy: tf.distribute.Strategy) -> tf.Tensor:
        """Over the engine: each worker's part of the rows goes to it, and theirs for this one come."""
        engine = engine_of(strategy)
        assert engine is not None
        return all_to_all(engine, rows)

    @staticmethod
    def gathered(rows: tf.Tensor, count: int) -> tf.Tensor:
        """The rows of all `count` workers."""
        found = tf.distribute.get_replica_context().all_gather(rows, axis=0)
        return tf.ensure_shape(found, [count * rows.shape[0], *rows.shape[1:]])


def keep_left_over(pairs: Sequence[tuple[tf.Variable, tf.Tensor]], when: Any) -> None:
    """What is left over, for the next step; `when`: whether this one counts, None: it does."""
    for variable, lost in pairs:
        variable.assign(lost if when is None else tf.where(when, lost, variable))
