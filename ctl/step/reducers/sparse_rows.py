"""Sum over replicas of sparse gradients, such as those of embeddings, without making them dense.

The number of rows of a replica varies, but within one graph call TensorFlow's collectives keep the shape of
their first execution (decision 16). So rows are padded to one of a few sizes, replicas agree on the size of
each step, and each size has a separate collective. In this sum each replica fills one slot, and its other
slots are zero. If equal rows may be merged and the slots would be larger than the dense table, the dense
table is summed together with the number of gradients of each row, since a lazy optimizer must not receive
rows without a gradient. Rows that must not be merged always use slots: Adam of Keras 3, for example,
squares each row separately, so a sum of equal rows would be a different update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

NO_ROW = -1  # index of a placeholder row
_SMALLEST = 64  # rows
_GROWTH = 4  # from one size to the next: at most so many times the rows are sent
_MOST_ELEMENTS = 2**31 - 1  # of one collective
_DIGIT = 1 << 20  # numbers of rows travel as floats, in two digits


class _Rows(NamedTuple):
    """Rows of a table: `values[i]` of `[n, d]` belongs to row `indices[i]` of `[n]` int64."""

    indices: Any
    values: Any


@dataclass(frozen=True)
class _Slots:
    """Encoding of rows padded to `size`, with one slot for each of `replicas`."""

    size: int
    replicas: int

    def encode(self, replica: Any, rows: _Rows) -> Any:
        columns = tf.stack([rows.indices // _DIGIT + 1, rows.indices % _DIGIT], axis=1)
        sent = tf.concat([rows.values, tf.cast(columns, rows.values.dtype)], axis=1)
        before = tf.cast(replica, tf.int32) * self.size
        after = self.size * self.replicas - before - tf.shape(sent)[0]
        sent = tf.pad(sent, [[before, after], [0, 0]])
        return tf.ensure_shape(sent, [self.size * self.replicas, rows.values.shape[1] + 2])

    def decode(self, total: Any) -> _Rows:
        total = tf.boolean_mask(total, total[:, -2] > 0)
        high, low = (tf.cast(total[:, i], tf.int64) for i in (-2, -1))
        return _Rows((high - 1) * _DIGIT + low, total[:, :-2])


@dataclass(frozen=True)
class _Table:
    """Encoding as the dense table of `length` rows, with the number of gradients of each row."""

    length: int

    def encode(self, replica: Any, rows: _Rows) -> Any:
        counts = tf.ones([tf.size(rows.indices), 1], rows.values.dtype)
        return tf.math.unsorted_segment_sum(
            tf.concat([rows.values, counts], axis=1), rows.indices, self.length
        )

    def decode(self, total: Any) -> _Rows:
        indices = tf.where(total[:, -1] > 0)[:, 0]
        return _Rows(indices, tf.gather(total, indices)[:, :-1])


class SparseSum:
    """Sum of sparse gradients of one dtype and row shape, as gradients of one concatenated table.

    Args:
      gradients: tf.IndexedSlices of this replica. Rows with the index NO_ROW are left out.
      lengths: Number of rows of the table of each gradient.
      replicas: Number of replicas.
      merge: True if equal rows may be added up. If False, every row arrives as it was sent.
      even: True if static numbers of rows are equal on all replicas.
    """

    def __init__(
        self,
        gradients: Sequence[tf.IndexedSlices],
        lengths: Sequence[int],
        replicas: int,
        *,
        merge: bool,
        even: bool,
    ):
        self._lengths = list(lengths)
        self._row_shape, self._dtype = gradients[0].values.shape[1:], gradients[0].values.dtype
        self._rows = self._joined(gradients)
        static_rows = [g.values.shape[0] for g in gradients]
        self._encodings = _encodings(
            sum(static_rows) if even and None not in static_rows else None,
            sum(lengths),
            self._rows.values.shape[1],
            replicas,
            merge=merge,
        )
        if merge and len(self._encodings) > 1:
            self._rows = _merged(self._rows)

    @property
    def must_agree(self) -> bool:
        """True if the size differs from step to step."""
        return len(self._encodings) > 1

    def size_vote(self) -> Any:
        """Returns a one-hot vector `[sizes]`: the size that this replica needs."""
        sizes = tf.constant([encoding.size for encoding in self._encodings[:-1]], tf.int32)
        num_smaller = tf.math.count_nonzero(tf.size(self._rows.indices) > sizes)
        return tf.one_hot(num_smaller, len(self._encodings))

    def summed(self, votes: Any = None) -> list[tf.IndexedSlices]:
        """Returns the summed gradients. Called in replica context.

        Args:
          votes: Sum over replicas of `size_vote()`, if replicas must agree.
        """
        context = tf.distribute.get_replica_context()
        choice = tf.constant(0)
        if votes is not None:
            choice = tf.reduce_max(tf.where(votes > 0.5, tf.range(len(self._encodings)), 0))
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            rows = _switch(choice, [lambda e=e: self._sum_encoded(context, e) for e in self._encodings])
        else:
            rows_by_replica = context.merge_call(self._sum_across_replicas, args=(choice, *self._rows))
            rows = rows_by_replica[_replica_number(context) % len(rows_by_replica)]
        return self._by_table(_Rows(*rows))

    def _sum_encoded(self, context: Any, encoding: Any) -> _Rows:
        sent = encoding.encode(context.replica_id_in_sync_group, self._rows)
        return encoding.decode(context.all_reduce(tf.distribute.ReduceOp.SUM, sent))

    def _sum_across_replicas(self, strategy: Any, choice: Any, indices: Any, values: Any) -> list[_Rows]:
        """Returns the sum for each replica of this worker. MirroredStrategy needs conditions outside."""
        each, local = strategy.extended.call_for_each_replica, strategy.experimental_local_results

        def encode(encoding: Any, *rows: Any) -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return encoding.encode(replica, _Rows(*rows))

        def run(encoding: Any) -> list[_Rows]:
            sent = each(encode, args=(encoding, indices, values))
            total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, sent, destinations=sent)
            decoded = each(encoding.decode, args=(total,))
            pairs = zip(local(decoded.indices), local(decoded.values), strict=True)
            return [_Rows(*rows) for rows in pairs]

        return _switch(local(choice)[0], [lambda e=e: run(e) for e in self._encodings])

    def _joined(self, gradients: Sequence[tf.IndexedSlices]) -> _Rows:
        """Returns the rows of all tables. Row numbers of each table follow those of the previous one."""
        carrier = self._dtype if self._dtype in (tf.float32, tf.float64) else tf.float32
        width = self._row_shape.num_elements()
        indices, values, first = [], [], 0
        for gradient, length in zip(gradients, self._lengths, strict=True):
            numbers = tf.cast(gradient.indices, tf.int64)
            indices.append(tf.where(numbers < 0, numbers, numbers + first))
            values.append(tf.cast(tf.reshape(gradient.values, [-1, width]), carrier))
            first += length
        return _real(_Rows(tf.concat(indices, axis=0), tf.concat(values, axis=0)))

    def _by_table(self, rows: _Rows) -> list[tf.IndexedSlices]:
        parts, first = [], 0
        for length in self._lengths:
            if len(self._lengths) == 1:
                table_rows = rows
            else:
                is_inside = (rows.indices >= first) & (rows.indices < first + length)
                table_rows = _Rows(*(tf.boolean_mask(part, is_inside) for part in rows))
            values = tf.reshape(tf.cast(table_rows.values, self._dtype), [-1, *self._row_shape])
            shape = tf.constant([length, *self._row_shape], tf.int64)
            parts.append(tf.IndexedSlices(values, table_rows.indices - first, shape))
            first += length
        return parts


def can_sum(gradient: Any, variable: Any) -> bool:
    """Returns True if `SparseSum` supports a gradient: floats, and a table of known shape."""
    return (
        isinstance(gradient, tf.IndexedSlices)
        and gradient.dtype.is_floating
        and tf.TensorShape(variable.shape).is_fully_defined()
        and gradient.values.shape[1:].is_fully_defined()
        and not isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    )


def has_unique_rows(gradient: Any) -> bool:
    """Returns True if the rows are unique within a replica's batch by construction.

    `tf.nn.embedding_lookup_sparse` looks up each distinct id of a batch once, so on one device the
    optimizer receives each row once. On several replicas their rows are merged, for the same update.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not hasattr(gradient.indices, "op"):
        return False
    tensor = gradient.indices
    while tensor.op.type in ("Reshape", "Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Unique", "UniqueV2") and tensor.value_index == 0


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient with unique row indices, so that its norm is that of the dense gradient."""
    rows = _merged(_Rows(gradient.indices, gradient.values))
    return tf.IndexedSlices(rows.values, rows.indices, gradient.dense_shape)


def without_no_row(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient without rows with the index NO_ROW."""
    rows = _real(_Rows(gradient.indices, gradient.values))
    return tf.IndexedSlices(rows.values, rows.indices, gradient.dense_shape)


def _real(rows: _Rows) -> _Rows:
    return _Rows(*(tf.boolean_mask(part, rows.indices >= 0) for part in rows))


def _merged(rows: _Rows) -> _Rows:
    indices, segments = tf.unique(rows.indices)
    return _Rows(indices, tf.math.unsorted_segment_sum(rows.values, segments, tf.size(indices)))


def _encodings(
    static_rows: int | None, length: int, width: int, replicas: int, *, merge: bool
) -> list[Any]:
    """Returns the possible encodings in increasing order of size; one if the number of rows is static.

    The last encoding can have any number of rows: it is the dense table if rows may be merged, else the
    largest slots that fit into one collective.
    """
    if not merge:
        max_rows = _MOST_ELEMENTS // (replicas * (width + 2))
        sizes = [static_rows] if static_rows is not None else _slot_sizes(max_rows)
        return [_Slots(size, replicas) for size in sizes]
    table_rows = length * (width + 1) / (replicas * (width + 2))  # number of rows as large as the table
    if static_rows is not None:
        return [_Slots(static_rows, replicas) if static_rows < table_rows else _Table(length)]
    return [*(_Slots(size, replicas) for size in _slot_sizes(table_rows)), _Table(length)]


def _slot_sizes(max_rows: float) -> list[int]:
    """Returns the sizes of slots (rows) below `max_rows`."""
    sizes, size = [], _SMALLEST
    while size < max_rows:
        sizes.append(size)
        size *= _GROWTH
    return sizes


def _switch(choice: Any, branches: list) -> Any:
    return branches[0]() if len(branches) == 1 else tf.switch_case(choice, branches)


def _replica_number(context: Any) -> int:
    return int(tf.get_static_value(context.replica_id_in_sync_group))
