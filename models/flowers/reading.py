"""Conversion of photos to arrays. Each file is checked once and then decoded by its index.

All workers exclude the same files: no worker uses a file that another worker cannot use.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ctl
import numpy as np
import tensorflow as tf

from models.flowers.files import UnusableError, read
from models.flowers.photos import Photos, list_names

_log = logging.getLogger("ctl.models")
_THREADS = 16  # more than cores, as a mounted bucket has a high latency


@dataclass(frozen=True)
class Reading:
    """Settings for reading photos.

    Attributes:
      cache: "memory" keeps all decoded photos in memory, "none" decodes a photo each time it is used.
      strict: If True, a file that cannot be used ends the run before training. If False, it is excluded.
      max_pixels: Largest height times width of a photo (pixels).
      split_seed: Seed of the split into training and held-out photos.
    """

    cache: str = "memory"
    strict: bool = False
    max_pixels: int = 50_000_000
    split_seed: int = 123


@dataclass(frozen=True)
class Images:
    """The photos that can be used.

    Attributes:
      rows: "train" and "test" -> numbers of photos.
      get: Numbers `[b]` -> images, uint8 `[b, size, size, 3]`, for use in graphs.
    """

    rows: dict[str, np.ndarray]
    get: Callable


def open_photos(photos: Photos, reading: Reading, size: int, trainer: ctl.Trainer) -> Images:
    """Checks every file and returns the photos that can be used. All workers must call it.

    The workers divide the files among themselves. With the cache, each worker reads all files.

    Raises UsageError if too few photos remain, and with `strict` for any file that cannot be used.
    """
    agreement, count = ctl.HostAllReduce(trainer.strategy), len(photos.paths)
    _check_same_files(photos, agreement)
    topology = trainer.topology
    in_memory = reading.cache == "memory"
    numbers = range(count) if in_memory else range(topology.worker_index, count, topology.num_workers)
    cache = np.zeros((count, size, size, 3), np.uint8) if in_memory else None
    decode = tf.function(decode_photo).get_concrete_function(tf.TensorSpec([], tf.string), size)

    def check(number: int) -> str:
        try:
            image = decode(tf.constant(read(photos.paths[number], reading.max_pixels)))
        except UnusableError as e:
            return str(e)
        except tf.errors.InvalidArgumentError:
            return "damaged"
        if cache is not None:
            cache[number] = image
        return ""

    error_by_number = dict(zip(numbers, _call_in_threads(check, numbers), strict=True))
    is_unusable = agreement.sum([bool(error_by_number.get(i)) for i in range(count)]) > 0
    warning = _describe_unusable(photos, is_unusable, error_by_number, strict=reading.strict)
    if warning and topology.is_chief:
        _log.warning("%s", warning)
    rows = {part: r[~is_unusable[r]] for part, r in photos.split(reading.split_seed).items()}
    if not all(map(len, rows.values())):
        raise ctl.UsageError(
            f"{photos.directory} has {(~is_unusable).sum()} photos; expected at least five, since a fifth "
            "is held out for validation."
        )
    return Images(rows, _create_getter(photos, cache, size))


def decode_photo(encoded, size: int):
    """Decodes a JPEG `[]` to uint8 `[size, size, 3]`. Grey and CMYK are converted to RGB."""
    image = tf.image.resize(tf.io.decode_jpeg(encoded, channels=3), [size, size])
    return tf.cast(tf.round(image), tf.uint8)


def decode_photos(encoded, size: int, load=tf.identity):
    """Decodes JPEGs to uint8 `[b, size, size, 3]`.

    Args:
      encoded: Arguments of `load`, `[b]`.
      size: Height and width of the images (pixels).
      load: Returns an encoded JPEG `[]`. By default `encoded` contains the JPEGs.
    """
    spec = tf.TensorSpec([size, size, 3], tf.uint8)
    return tf.map_fn(lambda e: decode_photo(load(e), size), encoded, fn_output_signature=spec)


def _call_in_threads(function: Callable[[int], str], numbers: Sequence[int]) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, numbers))


def _create_getter(photos: Photos, cache: np.ndarray | None, size: int) -> Callable:
    if cache is not None:
        images = tf.convert_to_tensor(cache)
        return lambda index: tf.gather(images, index)
    paths = tf.constant([str(p) for p in photos.paths])
    return lambda index: decode_photos(tf.gather(paths, index), size, tf.io.read_file)


def _check_same_files(photos: Photos, agreement: ctl.HostAllReduce) -> None:
    bits = [float(photos.digest() >> i & 1) for i in range(32)]
    if not set(agreement.sum(bits)) <= {0.0, float(agreement.num_workers)}:
        raise ctl.UsageError(
            f"The workers have different files in {photos.directory}; expected the same on all. Put them "
            "on shared storage, or copy them again."
        )


def _describe_unusable(
    photos: Photos, is_unusable: np.ndarray, error_by_number: dict, *, strict: bool
) -> str:
    """Returns a warning about the files that cannot be used, or "". Raises UsageError to end the run."""
    names = [
        f"{photos.name(int(i))} ({error_by_number.get(i) or 'refused by another worker'})"
        for i in np.flatnonzero(is_unusable)
    ]
    names += [f"{photos.inside(path)} (not named .jpg)" for path in photos.other_files]
    if not names:
        return ""
    count = len(is_unusable) + len(photos.other_files)
    text = f"{len(names)} of {count:,} files in {photos.directory} cannot be used: {list_names(names)}."
    if strict:
        raise ctl.UsageError(f"{text} Repair or remove them, or leave --strict_data out.")
    empty_classes = set(range(len(photos.classes))) - set(photos.labels[~is_unusable])
    if empty_classes:
        raise ctl.UsageError(f"{text} No photo of {photos.classes[min(empty_classes)]} remains.")
    return f"{text} They are left out."
