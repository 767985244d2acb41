"""Sum of gradients that travel with 8 bits per number (`wire_dtype="int8"`).

A block of 256 numbers has one scale, its largest absolute value (Dettmers 2016, arXiv:1511.04561). The
rounding error is added to the gradient of the next step (error feedback: Seide et al. 2014; Karimireddy et
al. 2019, arXiv:1901.09847; of the sum: Tang et al. 2019, arXiv:1905.05957).

    x = gradient + error of the previous step
    engine      part r of x travels to worker r, which sums the parts and sends the sum to all workers
    otherwise   all of x travels to all workers
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.engine_all_reduce import all_to_all, engine_of
from ctl.distribute.keras_objects import unwrap
from ctl.errors import UsageError
from ctl.step import optimizers
from ctl.step.context import StepContext
from ctl.step.reducers.reducer import ReducerInputs
from ctl.step.reducers.sum import SumReducer, selected, sum_gradients, suspects_of
from ctl.step.reducers.worker_state import WorkerState, variable_like
from ctl.step.update_request import UpdateRequest

BLOCK = 256  # numbers with one scale
_MIN_NUMBERS = 4096  # smaller variables are summed in their own dtype
_NUM_INTS = BLOCK // 4  # as TensorFlow's collectives take no int8
_MIN_SCALE = 1e-30  # smaller blocks are zeros


def encoded(numbers: tf.Tensor) -> tf.Tensor:
    """Encodes `[n, 256]` float32 as `[n, 65]` int32: 256 numbers of 8 bits and a float32 scale per block.

    A block with a number that is not finite becomes meaningless.
    """
    scales = tf.reduce_max(tf.abs(numbers), axis=1, keepdims=True)
    scales = tf.where(scales > _MIN_SCALE, scales, 0.0)
    codes = tf.cast(tf.round(numbers * tf.math.divide_no_nan(127.0, scales)), tf.int8)
    ints = tf.bitcast(tf.reshape(codes, [-1, _NUM_INTS, 4]), tf.int32)
    return tf.concat([ints, tf.bitcast(scales, tf.int32)], axis=1)


def decoded(blocks: tf.Tensor) -> tf.Tensor:
    """Decodes the result of `encoded` to `[n, 256]` float32."""
    codes = tf.reshape(tf.bitcast(blocks[:, :_NUM_INTS], tf.int8), [-1, BLOCK])
    return tf.cast(codes, tf.float32) * (tf.bitcast(blocks[:, _NUM_INTS:], tf.float32) / 127.0)


class Int8Reducer(SumReducer):
    """Sums large dense gradients of models with 8 bits per number, over workers with one replica each."""

    worker_state: WorkerState

    def __init__(self, inputs: ReducerInputs):
        self._strategy, self._topology = inputs.strategy, inputs.topology
        variables = map(unwrap, inputs.trainable_variables)
        large = [v for v in variables if (v.shape.num_elements() or 0) >= _MIN_NUMBERS]
        local = [inputs.strategy.experimental_local_results(v)[0] for v in large]
        errors = [variable_like(v, "left_over") for v in local]
        self._error_by_id = dict(zip(map(id, large), errors, strict=True))
        self.worker_state = WorkerState(inputs.strategy, inputs.topology, errors)

    def tracked_variables(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Returns the rounding errors of this worker."""
        return {"left_out_of_sums": self.worker_state.variables}

    def begin(self, step: int) -> None:
        """Loads the restored errors, and redistributes them if the number of workers has changed."""
        factor = self.worker_state.scatter() / self.worker_state.num_workers
        for variable in self._error_by_id.values():
            variable.assign(variable * factor)

    def _exchange(self, request: UpdateRequest, context: StepContext) -> tuple[list, Any, list]:
        pairs = list(zip(request.gradients, request.variables, strict=True))
        dense = [i for i, (g, _) in enumerate(pairs) if not isinstance(g, tf.IndexedSlices)]
        rounded = [i for i in dense if id(unwrap(pairs[i][1])) in self._error_by_id]
        exact = [i for i in range(len(pairs)) if i not in rounded]
        sums, suspects = sum_gradients(selected(request, exact), context, suspects_of(request))
        if not rounded:
            return sums, suspects, []
        totals, assignments = self._sum_rounded([pairs[i] for i in rounded])
        total_by_index = dict(zip([*exact, *rounded], [*sums, *totals], strict=True))
        return [total_by_index[i] for i in range(len(pairs))], suspects, assignments

    def _sum_rounded(self, pairs: Sequence[tuple[Any, Any]]) -> tuple[list, list]:
        """Returns the sums of gradients, equal on all workers, and pairs (variable, its new error)."""
        errors = [self._error_by_id[id(unwrap(variable))] for _, variable in pairs]
        shapes, sizes = [e.shape for e in errors], [e.shape.num_elements() for e in errors]
        gradients = [gradient for gradient, _ in pairs]
        parts = [
            tf.reshape(tf.cast(g, tf.float32) + e, [-1]) for g, e in zip(gradients, errors, strict=True)
        ]
        count, total = self._topology.num_workers, sum(sizes)
        rows = math.ceil(total / (count * BLOCK))  # of the part of one worker
        padding = tf.zeros([rows * count * BLOCK - total])
        sums, lost = self._sum_blocks(tf.reshape(tf.concat([*parts, padding], axis=0), [-1, BLOCK]), rows)

        def split(flat: tf.Tensor) -> list:
            pieces = tf.split(tf.reshape(flat, [-1])[:total], sizes)
            return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]

        totals = [tf.cast(s, g.dtype) for s, g in zip(split(sums), gradients, strict=True)]
        return totals, list(zip(errors, split(lost), strict=True))

    def _sum_blocks(self, numbers: tf.Tensor, rows: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sum over workers, and the rounding error of this worker."""
        count, rank = self._topology.num_workers, self._topology.worker_index
        sent = encoded(numbers)
        lost = numbers - decoded(sent)
        engine = engine_of(self._strategy)
        if engine is None:
            received = decoded(_gathered(sent, count))
            return tf.reduce_sum(tf.reshape(received, [count, -1, BLOCK]), axis=0), lost
        received = decoded(all_to_all(engine, sent))
        part_sum = tf.reduce_sum(tf.reshape(received, [count, rows, BLOCK]), axis=0)
        part = encoded(part_sum)
        lost += tf.pad(part_sum - decoded(part), [[rank * rows, (count - 1 - rank) * rows], [0, 0]])
        return decoded(_gathered(part, count)), lost


def _gathered(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the rows of all `count` workers."""
    joined = tf.distribute.get_replica_context().all_gather(rows, axis=0)
    return tf.ensure_shape(joined, [count * rows.shape[0], *rows.shape[1:]])


def create_int8(inputs: ReducerInputs) -> Int8Reducer | None:
    """Creates the reducer for `wire_dtype="int8"`; None for other types and on one worker.

    Raises:
      UsageError: If the strategy, `sync_every` or an optimizer does not support it.
    """
    if inputs.settings.wire_dtype != "int8":
        return None
    if not inputs.has_one_replica_per_worker:
        raise UsageError(
            f"wire_dtype='int8' with {inputs.description}; expected one replica per worker. Write "
            "wire_dtype='bfloat16', or --strategy=multi_worker with one device per worker."
        )
    for name, optimizer in inputs.optimizers.items():
        if optimizers.skips_what_is_not_finite(optimizer):
            raise UsageError(
                f"wire_dtype='int8' with self.{name}, a LossScaleOptimizer: the rounding errors of a step "
                "are added to the next step, which may have another scale. Train with the policy "
                "'mixed_bfloat16'."
            )
    return Int8Reducer(inputs) if inputs.topology.num_workers > 1 else None
