"""Snapshots of all variables at one step. All workers take part in reading; only the chief writes.

Reading may be a collective, for variables that are sums over workers. Writing is not: the chief can write a
snapshot later, on any thread. The files are byte for byte those of `tf.train.Checkpoint.write`. The keys of
the tensors come from private methods of `tf.train.Checkpoint`. If a version of TensorFlow lacks them,
`SnapshotReader.take` returns None, and the caller uses `write_with_tensorflow`.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints import tensor_files
from ctl.checkpoints.commit import read_error
from ctl.checkpoints.tracked_state import TrackedState
from ctl.distribute.keras_objects import unwrap
from ctl.errors import CheckpointError
from ctl.io import paths
from ctl.io.paths import AnyPath
from ctl.tensorflow_patches import checkpoint_contents

_VALUE = "VARIABLE_VALUE"  # attribute name of the tensor of a variable in TensorFlow's object graph
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # key of the tensor with the object graph
_Row = tuple[str, str, Any]  # key of a tensor, slice of a partitioned variable or "", value


class Snapshot:
    """Tensors with their keys in a checkpoint.

    Args:
      rows: Rows (key, slice of a partitioned variable or "", value).
      keys: Name of a variable -> key of its tensor.

    Attributes:
      keys: As above.
      num_bytes: Size of all tensors (bytes).
    """

    def __init__(self, rows: list[_Row], keys: dict[str, str]):
        self._rows = rows
        self.keys = keys
        self.num_bytes = sum(_num_bytes(value) for _, _, value in rows)

    def write(self, prefix: str) -> None:
        """Writes `prefix.index` and `prefix.data-00000-of-00001`. Raises OSError.

        TensorFlow renames its files. On a file system that refuses this, the files are written to a
        temporary directory and copied.
        """
        path = paths.path(prefix)
        try:
            self._write(prefix)
        except OSError:
            if paths.is_url(prefix) or paths.has_rename(path):
                raise
            with tempfile.TemporaryDirectory(prefix="ctl-state-") as temporary:
                self._write(f"{temporary}/{path.name}")
                for file in sorted(Path(temporary).iterdir()):
                    paths.copy_tree(file, path.parent / file.name)

    def _write(self, prefix: str) -> None:
        keys, slices, values = zip(*self._rows, strict=True)
        try:
            with tf.device("/device:CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=prefix,
                    tensor_names=list(keys),
                    shape_and_slices=list(slices),
                    tensors=[tf.convert_to_tensor(v) for v in values],
                )
        except tf.errors.OpError as e:
            raise OSError(e.message) from e


class SnapshotReader:
    """A reader of snapshots, which reuses the buffers of the previous snapshot.

    It also reuses the layout of the previous snapshot, because creating one takes as long as copying a
    large model. This is possible if the layout holds functions that read the variables, and no values.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], np.ndarray] = {}
        self._cached_layout: tuple[Any, list[_Row], dict[str, str]] | None = None

    def take(self, state: TrackedState, *, keep: bool, copy: bool) -> Snapshot | None:
        """Reads every variable. All workers must call it at the same step.

        Args:
          state: The variables.
          keep: If False, the values are dropped after reading, for workers that do not write.
          copy: If True, the values are copied, so that training can continue before they are written.

        Returns:
          The snapshot, or None if this version of TensorFlow does not provide the layout.
        """
        if self._cached_layout is None or self._cached_layout[0] is not state.checkpoint:
            serialized = _serialize(state.checkpoint)
            if serialized is None:
                return None
            layout, keys = list(serialized[0]), _keys_of_variables(state, serialized[1])
            is_reusable = all(
                key == _GRAPH or checkpoint_contents.is_function(value) for key, _, value in layout
            )
            self._cached_layout = (state.checkpoint, layout, keys) if is_reusable else None
        else:
            _, layout, keys = self._cached_layout
        rows = []
        for key, part, value in layout:
            tensor = _read(value)  # may be a collective
            if keep and tensor is not None:
                rows.append((key, part, self._copied((key, part), tensor) if copy else tensor))
        return Snapshot(rows, keys)

    def _copied(self, key: tuple[str, str], tensor: Any) -> Any:
        if tensor.dtype.as_numpy_dtype not in _NATIVE:
            return tensor.numpy() if tensor.dtype != tf.string else tensor  # numpy() copies
        values = np.asarray(tensor)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = self._buffers[key] = np.empty_like(values)
        np.copyto(buffer, values)
        return buffer


_NATIVE = (np.float32, np.float64, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8,
           np.uint16, np.uint32, np.uint64, np.bool_, np.complex64, np.complex128)  # fmt: skip


def write_with_tensorflow(state: TrackedState, prefix: str) -> None:
    """Calls `tf.train.Checkpoint.write`, with errors of the file system as OSError. All workers call it."""
    try:
        state.checkpoint.write(prefix)
    except _WRITE_ERRORS as e:
        raise OSError(e.message) from e


def restore_state(state: TrackedState, path: AnyPath, saved: Mapping[str, Any]) -> None:
    """Assigns the tensors of a checkpoint to the variables of `state`.

    Args:
      state: The variables.
      path: Directory of the checkpoint.
      saved: Variables in the checkpoint, by name.

    Raises:
      ReadError: If a file cannot be read after several attempts.
      CheckpointError: If restoring fails for another reason.
    """
    try:
        paths.call_with_retries(lambda: _restore(state.checkpoint_for(saved), path), where=path)
    except OSError as e:
        raise read_error(f"The checkpoint {path}", e) from e


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


_WRITE_ERRORS = (
    tf.errors.ResourceExhaustedError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
    tf.errors.DataLossError,
)


def _serialize(checkpoint: Any) -> tuple[Iterator[_Row], Any] | None:
    """Returns the layout, in the same order on all workers, and the object graph, or None."""
    contents = checkpoint_contents.serialized_tensors(checkpoint)
    return None if contents is None else (_rows(contents[0]), contents[1])


def _rows(tensors: Any) -> Iterator[_Row]:
    for value_by_key in tensors.values():
        for key, parts in value_by_key.items():
            for part, value in (parts if isinstance(parts, dict) else {"": parts}).items():
                yield value.name if hasattr(value, "slice_spec") else key, part.strip(), value


def _read(value: Any) -> tf.Tensor | None:
    """Returns the tensor of a value of the layout on the CPU, or None if it has no value yet."""
    if hasattr(value, "slice_spec"):
        with tf.device(value.device):
            value = value.tensor
    if value is None:
        return None
    with tf.device("/device:CPU:0"):
        return tf.identity(value)


def _keys_of_variables(state: TrackedState, graph: Any) -> dict[str, str]:
    """Returns name -> key of the tensor, for the variables that are saved as a single tensor."""
    nodes = checkpoint_contents.tracked_objects(state.checkpoint)
    key_by_id: dict[int, str] = {}
    for node, proto in zip(nodes, graph.nodes, strict=False):
        keys = [a.checkpoint_key for a in proto.attributes if a.name == _VALUE]
        if len(keys) == 1:
            key_by_id.setdefault(id(unwrap(node)), keys[0])
    return {name: key_by_id[id(v)] for name, v in state.variables.items() if id(v) in key_by_id}


def _num_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if value.dtype == tf.string:
        return sum(len(text) for text in np.ravel(value.numpy()))
    return int(np.prod(value.shape.as_list())) * value.dtype.size
