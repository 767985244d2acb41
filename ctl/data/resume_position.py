"""Whether a pipeline can be resumed exactly, and the position of its iterator.

indexed    examples in memory: any position is found at once
skip       any dataset: made again from its seed, and skipped
iterator   by choice: what the chief's iterator has read ahead is saved; nothing is read twice
"""

import logging
import struct
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.data import dataset_traits
from ctl.errors import UsageError

MODES = ("auto", "indexed", "skip", "iterator")
MOST_PASSES = 2**40  # of a dataset whose iterator is saved: it never ends before the run does
_log = logging.getLogger("ctl")


def _obstacles(dataset: tf.data.Dataset, traits: dataset_traits.Traits, resumable: bool) -> list[str]:
    """What may keep a dataset from giving the same examples again, as parts of a sentence."""
    found = traits.operations
    reasons = []
    if found & dataset_traits.PYTHON_OPS:
        reasons.append("it calls Python code (from_generator, py_function), which has to repeat itself")
    if found & dataset_traits.RANDOM_OPS:
        names = ", ".join(sorted(found & dataset_traits.RANDOM_OPS))
        reasons.append(f"it draws random numbers with a state ({names}); write tf.random.stateless_*")
    if traits.any_order:
        reasons.append(traits.any_order)
    if resumable and traits.unseeded:
        reasons.append(
            f"it {traits.unseeded.cause} and was made before training began, so a resumed run would "
            f"see some examples twice and others not at all; write {traits.unseeded.cure}, or make it in "
            "train_data (for ctl.fit: after tf.random.set_seed(0))"
        )
    return reasons


def check_mode(mode: str, *, in_memory: bool, own_files: bool) -> None:
    """Raises UsageError for a mode that train_data cannot have; `own_files`: each worker reads its own."""
    if mode not in MODES:
        raise UsageError(f"data_position is {mode!r}; expected one of {', '.join(MODES)}.")
    if (mode == "indexed" and not in_memory) or (mode in ("skip", "iterator") and in_memory):
        has = "examples in memory, which are indexed" if in_memory else "a tf.data.Dataset"
        raise UsageError(
            f"data_position is {mode!r}, and train_data gives {has}. Leave data_position out"
            + ("." if in_memory else ", or return ctl.from_arrays(...).")
        )
    if mode == "iterator" and own_files:
        raise UsageError(
            "data_position is 'iterator', which saves the chief's, and ctl.shard gives each worker data "
            "of its own. Write data_position = 'skip'."
        )


def checked_dataset(
    dataset: tf.data.Dataset, mode: str, *, is_chief: bool, resumable: bool = True
) -> tf.data.Dataset:
    """Names, at start, what keeps `dataset` from being resumed exactly in `mode`, "skip" or "iterator".

    A warning lists the obstacles if the run is `resumable`, which means that it has checkpoints. Returns
    the same dataset, made repeatable where random layers are called in parallel. Raises UsageError where an
    iterator could not be saved at all.
    """
    traits = dataset_traits.Traits(dataset)
    reasons = _obstacles(dataset, traits, resumable)
    if mode == "iterator" and any("Python" in r or "random" in r for r in reasons):
        raise UsageError(
            f"train_data cannot save its iterator: {'; '.join(reasons)}. Write data_position = 'skip', or "
            "use TensorFlow operations without a state."
        )
    if reasons and is_chief and resumable:
        _log.warning(
            "train_data is resumed exactly only if it gives the same examples when it is made again: %s.",
            "; ".join(reasons),
        )
    if not traits.parallel_state or mode == "iterator":
        return dataset
    if is_chief:
        _log.info(
            "train_data draws random numbers in a map with num_parallel_calls, where their order differs "
            "from run to run; that map is done one example at a time. To have it in parallel, write "
            "tf.random.stateless_*, or move random layers to train_step."
        )
    return dataset_traits.repeatable(dataset)


class SavedIterator:
    """The position of an iterator as a variable of bytes, so that any checkpoint manager keeps it.

    Attributes:
      variable: `[]` string; "" before anything was taken or restored.
    """

    def __init__(self) -> None:
        self.variable = tf.Variable("", trainable=False, name="data_iterator", dtype=tf.string)
        self._iterator: Any = None

    def opened(self, iterator: Any) -> None:
        """Puts a new iterator where the restored one was; from now on `take` is about it.

        Raises UsageError for one that cannot be saved, or a restored position in another pipeline.
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
                        "data_position is 'iterator', and the checkpoint has the iterator of another "
                        f"pipeline ({_first_line(e)}). Return the same train_data, and give epochs if that "
                        "run had epochs, steps if it had steps; or set data_position='skip'."
                    ) from e
        self._iterator = iterator
        self.take()

    def take(self) -> None:
        """Notes the position of now, for a save."""
        if self._iterator is None:
            return
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
    (count,), at, files = struct.unpack_from("<I", data), 4, []
    for _ in range(count):
        size, length = struct.unpack_from("<IQ", data, at)
        at += 12
        name = data[at : at + size].decode("ascii")
        files.append((Path(name).name, data[at + size : at + size + length]))
        at += size + length
    return files
