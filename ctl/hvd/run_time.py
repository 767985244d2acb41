"""Ranks and sizes as graph operations, because an elastic job changes them between two runs of a graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.hvd import process
from ctl.hvd.process_sets import ProcessSet, get_process_set_ids_and_ranks, resolve_process_set


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `rank()` when the graph runs, `[]` int32."""
    return _evaluate_at_run_time(process.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_rank()` when the graph runs, `[]` int32."""
    return _evaluate_at_run_time(process.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_size()` when the graph runs, `[]` int32."""
    return _evaluate_at_run_time(process.local_size)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the size of a process set when the graph runs, `[]` int32."""
    return _evaluate_at_run_time(lambda: len(_lookup_ranks(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 if this rank is in a process set when the graph runs, else 0, `[]` int32."""
    return _evaluate_at_run_time(lambda: int(process.rank() in _lookup_ranks(process_set_id)))


def index_op(process_set: ProcessSet) -> tf.Tensor:
    """Returns the index of this rank in a process set when the graph runs, `[]` int32."""
    return _evaluate_at_run_time(lambda: resolve_process_set(process_set)[1].index(process.rank()))


def _lookup_ranks(number: int) -> Sequence[int]:
    return get_process_set_ids_and_ranks()[number]


def _evaluate_at_run_time(function: Any) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(function()), [], tf.int32)
    result.set_shape([])
    return result
