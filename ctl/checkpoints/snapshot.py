"""A state as of one step: every variable is read once, by all workers; writing it needs nobody else.

Reading may be a collective (variables that are summed over workers when they are read); files are
plain ones, so the chief writes them alone, at once or later, on any thread. They are byte for byte
what `tf.train.Checkpoint.write` makes. How a checkpoint lays out its tensors is asked of the
checkpoint itself, which is not public in TensorFlow: where that part is missing, `Reader.take` says
so with None, and the caller writes in the plain way.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints import tensor_files
from ctl.checkpoints.tracked_state import TrackedState
from ctl.distribute.keras_objects import plain
from ctl.errors import CheckpointError, ReadError
from ctl.io import paths
from ctl.io.paths import AnyPath

_VALUE = "VARIABLE_VALUE"  # what TensorFlow calls the tensor of a variable
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # and the tensor that says which object has which


class Snapshot:
    """Tensors with their names.

    Attributes:
      num_bytes: of all tensors; keys: name of a variable -> name of its tensor in the files.
    """

    def __init__(self, rows: list[tuple[str, str, Any]], keys: dict[str, str]):
        self._rows = rows  # (name, which part of a sliced variable, value)
        self.keys = keys
        self.num_bytes = sum(_num_bytes(value) for _, _, value in rows)

    def write(self, prefix: str) -> None:
        """Writes `prefix.index` and `prefix.data-00000-of-00001`; raises OSError.

        TensorFlow renames files of its own; where even that is refused, they are made elsewhere.
        """
        where = paths.path(prefix)
        try:
            self._write(prefix)
        except OSError:
            if paths.is_url(prefix) or paths.has_rename(where):
                raise
            with tempfile.TemporaryDirectory(prefix="ctl-state-") as elsewhere:
                self._write(f"{elsewhere}/{where.name}")
                for path in sorted(Path(elsewhere).iterdir()):
                    paths.copy_tree(path, where.parent / path.name)

    def _write(self, prefix: str) -> None:
        names, slices, values = zip(*self._rows, strict=True)
        try:
            with tf.device("/device:CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=prefix,
                    tensor_names=list(names),
                    shape_and_slices=list(slices),
                    tensors=[tf.convert_to_tensor(v) for v in values],
                )
        except tf.errors.OpError as e:
            raise OSError(e.message) from e


class Reader:
    """Takes snapshots; keeps the memory of the last one, which the next one overwrites.

    Keeps the layout as well where it says how to read and holds no values: asking for it takes as
    long as copying a large model, and the variables of a `State` stay the same.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], np.ndarray] = {}
        self._known: tuple[Any, list[tuple[str, str, Any]], dict[str, str]] | None = None

    def take(self, state: TrackedState, *, keep: bool, copy: bool) -> Snapshot | None:
        """Reads every variable, on all workers alike; None if this TensorFlow does not let us.

        Args:
          keep: whether this worker writes it; the others only take part.
          copy: into memory of its own, so that training may go on before it is written.
        """
        if self._known is None or self._known[0] is not state.checkpoint:
            found = _layout(state.checkpoint)
            if found is None:
                return None
            layout, keys = list(found[0]), _keys(state, found[1])
            lasting = all(key == _GRAPH or _says_how(value) for key, _, value in layout)
            self._known = (state.checkpoint, layout, keys) if lasting else None
        else:
            _, layout, keys = self._known
        rows = []
        for key, part, value in layout:
            tensor = _read(value)  # may be a collective
            if keep and tensor is not None:
                rows.append((key, part, self._copied((key, part), tensor) if copy else tensor))
        return Snapshot(rows, keys)

    def _copied(self, key: tuple[str, str], tensor: Any) -> Any:
        if tensor.dtype.as_numpy_dtype not in _NATIVE:
            return tensor.numpy() if tensor.dtype != tf.string else tensor  # numpy() copies
        here = np.asarray(tensor)
        mine = self._copies.get(key)
        if mine is None or mine.shape != here.shape or mine.dtype != here.dtype:
            mine = self._copies[key] = np.empty_like(here)
        np.copyto(mine, here)
        return mine


_NATIVE = (np.float32, np.float64, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8,
           np.uint16, np.uint32, np.uint64, np.bool_, np.complex64, np.complex128)  # fmt: skip


def write_plainly(state: TrackedState, prefix: str) -> None:
    """`tf.train.Checkpoint.write`: reads, together with all workers, and writes; raises OSError."""
    try:
        state.checkpoint.write(prefix)
    except _OF_FILES as e:
        raise OSError(e.message) from e


def restore_state(state: TrackedState, path: AnyPath, saved: Mapping[str, Any]) -> None:
    """Reads the tensors of a checkpoint directory, which has the variables `saved`, into `state`.

    Raises ReadError where files cannot be read, also not after some seconds; else CheckpointError.
    """
    try:
        paths.persistently(lambda: _restore(state.readable(saved), path), where=path)
    except OSError as e:
        failed = ReadError(f"The checkpoint {path} cannot be restored: {e.strerror or e}")
        failed.errno = e.errno
        raise failed from e


def _restore(checkpoint: tf.train.Checkpoint, path: AnyPath) -> None:
    try:
        with tensor_files.state_prefix(path) as prefix:
            status = checkpoint.read(prefix)
            status.assert_existing_objects_matched()
            status.expect_partial()  # no warnings about variables that only other settings need
    except OSError:
        raise
    except Exception as e:
        cause = tensor_files.file_error(e) if isinstance(e, tf.errors.OpError) else None
        if cause is not None:
            raise cause from e
        raise CheckpointError(f"The checkpoint {path} cannot be restored: {e}") from e


_OF_FILES = (
    tf.errors.ResourceExhaustedError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
    tf.errors.DataLossError,
)


def _layout(checkpoint: Any) -> tuple[Iterator[tuple[str, str, Any]], Any] | None:
    """(name, part, value to read) in the order that is the same on all workers, and the graph."""
    gather = getattr(getattr(checkpoint, "_saver", None), "_gather_serialized_tensors", None)
    if gather is None:
        return None
    found = gather()
    if not isinstance(found, tuple) or len(found) != 4 or found[2]:  # [2]: savers with own files
        return None
    return _flat(found[0]), found[3]


def _flat(tensors: Any) -> Iterator[tuple[str, str, Any]]:
    for by_key in tensors.values():
        for key, parts in by_key.items():
            for part, value in (parts if isinstance(parts, dict) else {"": parts}).items():
                name = value.name if hasattr(value, "slice_spec") else key
                yield name, part.strip(), value


def _read(value: Any) -> tf.Tensor | None:
    """The tensor of what TensorFlow would write, on the host; None for what has no value yet."""
    if hasattr(value, "slice_spec"):
        with tf.device(value.device):
            value = value.tensor
    elif callable(value):
        with tf.device(value.device):
            value = value()
    if value is None:
        return None
    with tf.device("/device:CPU:0"):
        return tf.identity(value)


def _says_how(value: Any) -> bool:
    """True for what reads a tensor each time it is asked, and holds none."""
    return callable(getattr(value, "_tensor", value))


def _keys(state: TrackedState, graph: Any) -> dict[str, str]:
    """Name of a variable -> name of its tensor, for those that are one tensor."""
    view = getattr(state.checkpoint._saver, "_graph_view", None)
    walk = getattr(view, "breadth_first_traversal", None)
    nodes = () if walk is None else walk()[0]
    found: dict[int, str] = {}
    for node, proto in zip(nodes, graph.nodes, strict=False):
        values = [a.checkpoint_key for a in proto.attributes if a.name == _VALUE]
        if len(values) == 1:
            found.setdefault(id(plain(node)), values[0])
    return {n: found[id(v)] for n, v in state.variables.items() if id(v) in found}


def _num_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if value.dtype == tf.string:
        return sum(len(text) for text in np.ravel(value.numpy()))
    return int(np.prod(value.shape.as_list())) * value.dtype.size
