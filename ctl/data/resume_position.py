"""Position of a run in its data, and obstacles to an exact resume.

indexed    Examples and batches that are read by index start at any position at once.
skip       Any dataset is rebuilt from its seed, and its first batches are skipped.
iterator   By request. The state of the chief's iterator is saved with its buffers, so no data are read
twice. Grain always saves the state of its iterator.
"""

import logging
import struct
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.data import dataset_traits
from ctl.errors import UsageError

MOST_PASSES = 2**40  # of a dataset with a saved iterator; the run ends before
_log = logging.getLogger("ctl")


def _obstacles(dataset: tf.data.Dataset, traits: dataset_traits.Traits, resumable: bool) -> list[str]:
    """Returns the reasons why a dataset may not repeat its examples, as parts of a sentence."""
    reasons = []
    if traits.operations & dataset_traits.PYTHON_OPS:
        reasons.append("it calls Python code (from_generator, py_function), which must repeat its results")
    random_ops = traits.operations & dataset_traits.RANDOM_OPS
    if random_ops:
        names = ", ".join(sorted(random_ops))
        reasons.append(f"it draws random numbers with a state ({names}); write tf.random.stateless_*")
    if traits.unordered_reason:
        reasons.append(traits.unordered_reason)
    if resumable and traits.unseeded:
        reasons.append(
            f"it {traits.unseeded.cause} and was made before training began, so a resumed run would "
            f"read some examples twice and miss other ones; write {traits.unseeded.fix}, or make it in "
            "train_data (for ctl.fit: after tf.random.set_seed(0))"
        )
    return reasons


def check_mode(mode: str, *, is_indexed: bool, is_per_worker: bool, own_mode: str = "") -> None:
    """Raises UsageError for a mode that the data do not support.

    Args:
      mode: Value of `data_position`.
      is_indexed: True if the data are arrays, a random-access source, or example numbers.
      is_per_worker: True if each worker reads separate data.
      own_mode: Mode of batches that Python code reads.
    """
    if mode == own_mode:
        return
    if (mode == "indexed" and not is_indexed) or (mode in ("skip", "iterator") and is_indexed):
        data = "examples that are read by index" if is_indexed else "batches"
        raise UsageError(
            f"data_position is {mode!r}, and train_data returns {data}. Leave data_position out"
            + ("." if is_indexed else ", or return ctl.from_arrays(...).")
        )
    if mode == "iterator" and is_per_worker:
        raise UsageError(
            "data_position is 'iterator', which saves the iterator of the chief, and ctl.shard gives each "
            "worker separate data. Write data_position = 'skip'."
        )


def checked_dataset(
    dataset: tf.data.Dataset,
    *,
    has_iterator: bool,
    is_chief: bool,
    resumable: bool = True,
    mode: str = "auto",
    starts_anywhere: bool = False,
) -> tf.data.Dataset:
    """Logs the obstacles to an exact resume, and makes parallel random functions sequential.

    Args:
      dataset: Dataset of `train_data`.
      has_iterator: True if checkpoints contain the iterator of the dataset.
      is_chief: True if this process logs.
      resumable: True if the run has checkpoints. False: the obstacles are not logged.
      mode: Value of `data_position`.
      starts_anywhere: True if Python code reads the batches and reaches any position itself.

    Returns:
      The dataset, with sequential calls of functions that have a state.

    Raises:
      UsageError: The iterator of the dataset cannot be saved, or the requested mode cannot be exact.
    """
    traits = dataset_traits.Traits(dataset)
    if traits.reads_service and mode in ("skip", "iterator"):
        raise UsageError(
            f"data_position is {mode!r}, and train_data reads from the tf.data service, which does not "
            "repeat its order. Leave data_position out: a resumed run then skips as many batches as were "
            "consumed, with a warning; or read the files in train_data without the service."
        )
    reasons = [] if starts_anywhere else _obstacles(dataset, traits, resumable)
    if has_iterator and any("Python" in r or "random" in r for r in reasons):
        raise UsageError(
            f"train_data cannot save its iterator: {'; '.join(reasons)}. Write data_position = 'skip', or "
            "use TensorFlow operations without a state."
        )
    if reasons and is_chief and resumable:
        _log.warning(
            "train_data is resumed exactly only if it yields the same examples when it is created again: "
            "%s.",
            "; ".join(reasons),
        )
    if not traits.has_parallel_state or has_iterator:
        return dataset
    if is_chief:
        _log.info(
            "train_data draws random numbers in a map with num_parallel_calls, where their order differs "
            "from run to run. That map therefore runs one example at a time. For a parallel map, write "
            "tf.random.stateless_*, or move random layers to train_step."
        )
    return dataset_traits.make_deterministic(dataset)


class SavedIterator:
    """State of an iterator in a string variable, which any checkpoint manager can save.

    Attributes:
      variable: String `[]`; "" until a state has been captured or restored.
    """

    def __init__(self) -> None:
        self.variable = tf.Variable("", trainable=False, name="data_iterator", dtype=tf.string)
        self._iterator: Any = None

    def attach(self, iterator: Any) -> None:
        """Loads the restored state into a new iterator. From now on `capture` stores its state.

        Raises:
          UsageError: The iterator cannot be saved, or the restored state belongs to another pipeline.
        """
        packed = self.variable.numpy()
        if packed:
            with tempfile.TemporaryDirectory(prefix="ctl-iterator-") as directory:
                for name, content in _unpacked(packed):
                    (Path(directory) / name).write_bytes(content)
                try:
                    status = tf.train.Checkpoint(iterator=iterator).read(f"{directory}/iterator")
                    status.assert_existing_objects_matched()
                except tf.errors.NotFoundError as e:
                    raise UsageError(
                        "data_position is 'iterator', and the checkpoint contains the iterator of another "
                        f"pipeline ({_first_line(e)}). Return the same train_data, and give epochs if that "
                        "run had epochs, steps if it had steps; or set data_position='skip'."
                    ) from e
        self._iterator = iterator
        self.capture()

    def capture(self) -> None:
        """Stores the current state in the variable, before a save."""
        with tempfile.TemporaryDirectory(prefix="ctl-iterator-") as directory:
            try:
                tf.train.Checkpoint(iterator=self._iterator).write(f"{directory}/iterator")
            except tf.errors.OpError as e:
                raise UsageError(
                    f"train_data cannot save its iterator: {_first_line(e)} Write data_position = 'skip'."
                ) from None
            files = sorted(Path(directory).glob("iterator.*"))
            self.variable.assign(_packed([(p.name, p.read_bytes()) for p in files]))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _packed(files: list[tuple[str, bytes]]) -> bytes:
    parts = [struct.pack("<I", len(files))]
    for name, content in files:
        parts += [struct.pack("<IQ", len(name), len(content)), name.encode("ascii"), content]
    return b"".join(parts)


def _unpacked(data: bytes) -> list[tuple[str, bytes]]:
    (count,), offset, files = struct.unpack_from("<I", data), 4, []
    for _ in range(count):
        size, length = struct.unpack_from("<IQ", data, offset)
        offset += 12
        name = data[offset : offset + size].decode("ascii")
        files.append((Path(name).name, data[offset + size : offset + size + length]))
        offset += size + length
    return files
