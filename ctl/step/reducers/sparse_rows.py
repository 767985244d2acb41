"""The sum over replicas of sparse gradients, those of embeddings: rows stay rows.

Each replica has another number of rows in every step, but within one graph call TensorFlow's collectives
keep the shape of their first execution (decision 16). So rows are padded to one of a few sizes; replicas
agree on the size of each step, and each size has a collective of its own. In that collective, a sum, each
replica fills a slot and leaves the others zero. Where equal rows may be merged and the slots would be
larger than the dense table, the dense table is summed, and beside it the number of gradients of each row: a
lazy optimizer must not get rows that no replica had. Rows that must not be merged always use slots: Adam of
Keras 3, for example, squares each row alone, so a sum of equal rows would be another update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

NO_ROW = -1  # index of a row that does not count
_SMALLEST = 64  # rows
_GROWTH = 4  # from one size to the next: at most so many times the rows are sent
_MOST_ELEMENTS = 2**31 - 1  # of one collective
_DIGIT = 1 << 20  # numbers of rows travel as floats, in two digits


class _Rows(NamedTuple):
    """`values[i]`, `[n, d]`, belongs to row `indices[i]`, `[n]` int64."""

    indices: Any
    values: Any


@dataclass(frozen=True)
class _Slots:
    """Rows are sent padded to `size`, in a slot for each of `replicas`."""

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
    """The dense table of `length` rows is sent, and how many gradients each row has."""

    length: int

    def encode(self, replica: Any, rows: _Rows) -> Any:
        ones = tf.ones([tf.size(rows.indices), 1], rows.values.dtype)
        return tf.math.unsorted_segment_sum(
            tf.concat([rows.values, ones], axis=1), rows.indices, self.length
        )

    def decode(self, total: Any) -> _Rows:
        indices = tf.where(total[:, -1] > 0)[:, 0]
        return _Rows(indices, tf.gather(total, indices)[:, :-1])


class SparseSum:
    """Sparse gradients of one dtype and row shape, as those of one table that holds all their tables.

    Args:
      gradients: this replica's tf.IndexedSlices; rows of index NO_ROW are left out.
      lengths: rows of each one's table.
      merge: equal rows may be added up. If False, every row arrives as it was sent.
      even: a static number of rows is the same on all replicas.
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
        known = [g.values.shape[0] for g in gradients]
        self._ways = _ways(
            sum(known) if even and None not in known else None,
            sum(lengths),
            self._rows.values.shape[1],
            replicas,
            merge=merge,
        )
        if merge and len(self._ways) > 1:
            self._rows = _merged(self._rows)

    @property
    def must_agree(self) -> bool:
        """Whether the size differs from step to step."""
        return len(self._ways) > 1

    def wanted(self) -> Any:
        """`[sizes]` zeros and a one: the size that this replica needs."""
        sizes = tf.constant([way.size for way in self._ways[:-1]], tf.int32)
        larger = tf.math.count_nonzero(tf.size(self._rows.indices) > sizes)
        return tf.one_hot(larger, len(self._ways))

    def summed(self, wanted: Any = None) -> list[tf.IndexedSlices]:
        """The rows of all replicas, one gradient for each of the constructor's. In replica context.

        `wanted` is the sum over replicas of `wanted()`, if they must agree.
        """
        context = tf.distribute.get_replica_context()
        choice = tf.constant(0)
        if wanted is not None:
            choice = tf.reduce_max(tf.where(wanted > 0.5, tf.range(len(self._ways)), 0))
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            rows = _switch(choice, [lambda w=way: self._within(context, w) for way in self._ways])
        else:
            found = context.merge_call(self._across_replicas, args=(choice, *self._rows))
            rows = found[_replica_number(context) % len(found)]
        return self._by_table(_Rows(*rows))

    def _within(self, context: Any, way: Any) -> _Rows:
        sent = way.encode(context.replica_id_in_sync_group, self._rows)
        return way.decode(context.all_reduce(tf.distribute.ReduceOp.SUM, sent))

    def _across_replicas(self, strategy: Any, choice: Any, indices: Any, values: Any) -> list[_Rows]:
        """The same sum for each of this worker's replicas; MirroredStrategy wants conditions outside."""
        each, local = strategy.extended.call_for_each_replica, strategy.experimental_local_results

        def encode(way: Any, *rows: Any) -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return way.encode(replica, _Rows(*rows))

        def run(way: Any) -> list[_Rows]:
            sent = each(encode, args=(way, indices, values))
            total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, sent, destinations=sent)
            found = each(way.decode, args=(total,))
            return [_Rows(*rows) for rows in zip(local(found.indices), local(found.values), strict=True)]

        return _switch(local(choice)[0], [lambda w=way: run(w) for way in self._ways])

    def _joined(self, gradients: Sequence[tf.IndexedSlices]) -> _Rows:
        """The rows of all tables, those of the second numbered after those of the first, and so on."""
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
                own = rows
            else:
                here = (rows.indices >= first) & (rows.indices < first + length)
                own = _Rows(*(tf.boolean_mask(part, here) for part in rows))
            values = tf.reshape(tf.cast(own.values, self._dtype), [-1, *self._row_shape])
            shape = tf.constant([length, *self._row_shape], tf.int64)
            parts.append(tf.IndexedSlices(values, own.indices - first, shape))
            first += length
        return parts


def can_sum(gradient: Any, variable: Any) -> bool:
    """Whether `SparseSum` takes this gradient: floats, and a table of known shape."""
    return (
        isinstance(gradient, tf.IndexedSlices)
        and gradient.dtype.is_floating
        and tf.TensorShape(variable.shape).is_fully_defined()
        and gradient.values.shape[1:].is_fully_defined()
        and not isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    )


def has_unique_rows(gradient: Any) -> bool:
    """Returns True if the rows are unique within a replica's batch by construction.

    `tf.nn.embedding_lookup_sparse` looks each word of a batch up once, so on one device the optimizer gets
    each row once. On several replicas the rows of all of them are merged for the same update.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not hasattr(gradient.indices, "op"):
        return False
    tensor = gradient.indices
    while tensor.op.type in ("Reshape", "Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Unique", "UniqueV2") and tensor.value_index == 0


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """With every index once, so that its norm is that of the dense one."""
    rows = _merged(_Rows(gradient.indices, gradient.values))
    return tf.IndexedSlices(rows.values, rows.indices, gradient.dense_shape)


def without_no_row(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Without the rows whose index is NO_ROW."""
    rows = _real(_Rows(gradient.indices, gradient.values))
    return tf.IndexedSlices(rows.values, rows.indices, gradient.dense_shape)


def _real(rows: _Rows) -> _Rows:
    return _Rows(*(tf.boolean_mask(part, rows.indices >= 0) for part in rows))


def _merged(rows: _Rows) -> _Rows:
    indices, places = tf.unique(rows.indices)
    return _Rows(indices, tf.math.unsorted_segment_sum(rows.values, places, tf.size(indices)))


def _ways(known: int | None, length: int, width: int, replicas: int, *, merge: bool) -> list[Any]:
    """Returns the ways to send rows, in increasing order of size; one way if their number is `known`.

    The last way takes any number of rows: the dense table if rows may be merged, else the largest slots
    that one collective can carry.
    """
    if not merge:
        most = _MOST_ELEMENTS // (replicas * (width + 2))
        return [_Slots(size, replicas) for size in ([known] if known is not None else _sizes(most))]
    largest = length * (width + 1) / (replicas * (width + 2))  # rows; more cost more than the table
    if known is not None:
        return [_Slots(known, replicas) if known < largest else _Table(length)]
    return [*(_Slots(size, replicas) for size in _sizes(largest)), _Table(length)]


def _sizes(largest: float) -> list[int]:
    """Returns the sizes of slots below `largest` (rows)."""
    sizes, size = [], _SMALLEST
    while size < largest:
        sizes.append(size)
        size *= _GROWTH
    return sizes


def _switch(choice: Any, branches: list) -> Any:
    return branches[0]() if len(branches) == 1 else tf.switch_case(choice, branches)


def _replica_number(context: Any) -> int:
    return int(tf.get_static_value(context.replica_id_in_sync_group))
