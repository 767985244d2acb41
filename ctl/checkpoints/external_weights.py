"""Weights that other programs have saved: TensorFlow checkpoints and weights files of Keras.

checkpoint prefix     runs/a/ckpt-100, of `tf.train.Checkpoint`, Orbit or tf_keras
directory             with the file `checkpoint` of `tf.train.CheckpointManager`; a SavedModel
weights file          .weights.h5, .h5 or .keras, of Keras 3 or tf_keras
"""

import contextlib
import io
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints import commit, tensor_files
from ctl.errors import CheckpointError, UsageError
from ctl.io import paths
from ctl.io.paths import AnyPath
from tensorflow.core.protobuf import trackable_object_graph_pb2

# attribute of a model that Keras 3 has exported, with copies of its attribute `variables`
_COPIES = "_all_variables"
_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_OPTIMIZER = re.compile(r"(?i:optim(i[sz]ers?)?)(?![a-z])|OptimizeLoss")  # not "optimal"
_DAMAGE = re.compile("DataLoss|OutOfRange|sstable|checksum|corrupt", re.IGNORECASE)
_KERAS_SUFFIXES = (".h5", ".keras", ".hdf5")


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a saved variable."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def fits(self, saved: "Spec") -> bool:
        """Returns True if a saved value can be assigned: equal shapes, equal or floating-point dtypes."""
        is_floating = "float" in self.dtype and "float" in saved.dtype
        return self.shape == saved.shape and (self.dtype == saved.dtype or is_floating)

    def converted(self, value: Any) -> np.ndarray:
        """Returns a saved value with this dtype."""
        converted: np.ndarray = np.asarray(value).astype(tf.as_dtype(self.dtype).as_numpy_dtype)
        return converted


@dataclass(frozen=True)
class Node:
    """An object of a TensorFlow checkpoint.

    Attributes:
      children: Name of the attribute -> index of the node.
      key: Key of the value if the object is a variable, else "".
    """

    children: Mapping[str, int]
    key: str


@dataclass(frozen=True)
class ExternalWeights:
    """The saved variables of another program, without its optimizers.

    Attributes:
      path: File, or prefix of the files.
      description: Kind of the file, for messages.
      specs: Key -> shape and dtype.
      labels: Key -> path of the variable, for messages.
      names: Key -> name of the variable in the program that saved it. Keys without a name are absent.
      nodes: Objects of a TensorFlow checkpoint, the root first; empty for other files.
      is_keras_file: True if the keys are paths in a weights file of Keras.
    """

    path: AnyPath
    description: str
    specs: Mapping[str, Spec]
    labels: Mapping[str, str]
    names: Mapping[str, str]
    nodes: Sequence[Node] = field(default_factory=tuple)
    is_keras_file: bool = False

    def read(self, keys: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns key -> value. Raises CheckpointError if the file is damaged."""
        if self.description == _TF_CHECKPOINT:
            with _read_errors(self.path), tensor_files.literal_prefix(self.path) as prefix:
                reader = tf.train.load_checkpoint(prefix)
                return {key: reader.get_tensor(key) for key in keys}
        with _read_errors(self.path), _h5_file(self.path) as file:
            return {key: np.asarray(file[key]) for key in keys}

    def keys_below(self, index: int) -> set[str]:
        """Returns the keys of the variables that belong to a node, without those of optimizers."""
        return {self.nodes[i].key for i in _paths_below(self.nodes, index)} - {""}


_TF_CHECKPOINT = "TensorFlow checkpoint"
_KERAS_FILE = "Keras weights file"


def open_external(source: str) -> ExternalWeights | None:
    """Returns the saved variables at a path, or None if it is not one of another program.

    Raises:
      UsageError: If the file that a directory names does not exist.
      CheckpointError: If a file cannot be read.
    """
    path = paths.path(source)
    if str(path).endswith(_KERAS_SUFFIXES) and paths.call_with_retries(path.is_file):
        return paths.call_with_retries(lambda: _open_keras_file(path))
    prefix = paths.call_with_retries(lambda: _find_prefix(path))
    return None if prefix is None else paths.call_with_retries(lambda: _open_checkpoint(prefix))


def _find_prefix(path: AnyPath) -> AnyPath | None:
    """Returns the prefix of the files of a TensorFlow checkpoint, or None."""
    source = re.sub(r"\.(index|data-\d+-of-\d+)$", "", str(path))
    if paths.path(f"{source}.index").is_file():
        return paths.path(source)
    if not path.is_dir() or (path / commit.MANIFEST).exists():
        return None
    if (path / "variables" / "variables.index").is_file():  # a SavedModel
        return path / "variables" / "variables"
    for directory in (path, path / "checkpoints"):
        if (directory / "checkpoint").is_file() and not _has_own_checkpoints(directory):
            return _newest_prefix(directory)
    return None


def _has_own_checkpoints(directory: AnyPath) -> bool:
    return any((entry / commit.MANIFEST).exists() for entry in directory.iterdir() if entry.is_dir())


def _newest_prefix(directory: AnyPath) -> AnyPath:
    """Returns the prefix that the file `checkpoint` names. The directory may have been moved."""
    text = (directory / "checkpoint").read_bytes().decode(errors="replace")
    match = re.search(r'^model_checkpoint_path:\s*"(.+)"\s*$', text, re.MULTILINE)
    if match is None:
        raise UsageError(
            f"--init_from: {directory / 'checkpoint'} names no checkpoint; expected a line such as "
            'model_checkpoint_path: "ckpt-100". Give the path of a checkpoint, .../ckpt-100.'
        )
    named = match[1]
    prefix = paths.path(named) if named.startswith("/") or paths.is_url(named) else directory / named
    for candidate in (prefix, directory / named.rpartition("/")[2]):
        if paths.path(f"{candidate}.index").is_file():
            return candidate
    raise UsageError(
        f"--init_from: {directory / 'checkpoint'} names {named!r}, and {prefix}.index does not exist; "
        "expected the files of this checkpoint. Give the path of another one, .../ckpt-100."
    )


def _open_checkpoint(prefix: AnyPath) -> ExternalWeights:
    with _read_errors(prefix), tensor_files.literal_prefix(prefix) as literal_prefix:
        reader = tf.train.load_checkpoint(literal_prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        specs = {key: Spec(tuple(shapes[key]), dtypes[key].name) for key in sorted(shapes)}
        if _GRAPH_KEY not in specs:  # of `tf.compat.v1.train.Saver`: the keys are names
            slots = {k for k in specs if _OPTIMIZER.search(k) or k.rpartition("/")[0] in specs}
            named = {k: k for k in specs if k not in slots and k != "global_step"}
            return ExternalWeights(prefix, _TF_CHECKPOINT, {k: specs[k] for k in named}, named, named)
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH_KEY))
    nodes, name_by_key = [], {}
    for node in graph.nodes:
        attribute = next((a for a in node.attributes if a.checkpoint_key in specs), None)
        key = "" if attribute is None else attribute.checkpoint_key
        children = {child.local_name: child.node_id for child in node.children}
        if "variables" in children:
            children.pop(_COPIES, None)
        nodes.append(Node(children, key))
        if attribute is not None:
            name_by_key[key] = attribute.full_name
    labels = {
        nodes[index].key: label
        for index, label in _paths_below(nodes, 0).items()
        if nodes[index].key and label not in ("save_counter", "global_step", "step")
    }
    names = {key: name_by_key[key] for key in labels if name_by_key[key]}
    return ExternalWeights(prefix, _TF_CHECKPOINT, {k: specs[k] for k in labels}, labels, names, nodes)


def _paths_below(nodes: Sequence[Node], first: int) -> dict[int, str]:
    """Returns index -> shortest path of the nodes below `first`, except through optimizers."""
    paths_by_index, queue = {first: ""}, deque([first])
    while queue:
        index = queue.popleft()
        for name, child in nodes[index].children.items():
            if child not in paths_by_index and not _OPTIMIZER.search(name):
                paths_by_index[child] = f"{paths_by_index[index]}/{name}".lstrip("/")
                queue.append(child)
    return paths_by_index


def _open_keras_file(path: AnyPath) -> ExternalWeights:
    import h5py

    specs: dict[str, Spec] = {}
    names: dict[str, str] = {}
    with _read_errors(path), _h5_file(path) as file:

        def visit(key: str, entry: Any) -> None:
            if not isinstance(entry, h5py.Dataset) or _OPTIMIZER.search(key):
                return
            specs[key] = Spec(tuple(entry.shape), entry.dtype.name)
            group, _, number = key.rpartition("/")
            layer_name = file[group].attrs.get("name")
            if isinstance(layer_name, str):  # of a file of Keras 3
                names[key] = f"{layer_name}/{number}"
            elif not group.endswith("vars"):  # of an older file: the keys are names
                names[key] = key.removeprefix("model_weights/").partition("/")[2].partition(":")[0]

        file.visititems(visit)
    return ExternalWeights(path, _KERAS_FILE, specs, {k: k for k in specs}, names, is_keras_file=True)


def _h5_file(path: AnyPath) -> Any:
    import h5py

    if str(path).endswith(".keras"):
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            members = [name for name in archive.namelist() if name.endswith(".h5")]
            if not members:
                raise ValueError("the archive has no .h5 file")
            return h5py.File(io.BytesIO(archive.read(members[0])), "r")
    return h5py.File(path if isinstance(path, Path) else io.BytesIO(path.read_bytes()), "r")


@contextlib.contextmanager
def _read_errors(path: AnyPath) -> Iterator[None]:
    """Translates errors of readers within the block to CheckpointError, or ReadError for I/O errors."""
    try:
        yield
    except Exception as e:
        cause: Exception | None = e
        if isinstance(e, tf.errors.OpError):
            cause = (
                None if _DAMAGE.search(f"{type(e).__name__} {e.message}") else tensor_files.file_error(e)
            )
        if isinstance(cause, OSError) and cause.errno is not None and not paths.is_permanent_error(cause):
            raise commit.read_error(f"--init_from {path}", cause) from e
        raise CheckpointError(
            f"--init_from {path} cannot be read: {e}. Expected the files of a TensorFlow checkpoint, a "
            ".weights.h5 or a .keras file. Restore it from a backup, or give another path."
        ) from e
