"""Conversion of photos to arrays. Each file is checked once and then decoded by its index.

All workers exclude the same files: no worker uses a file that another worker cannot use.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import ctl
import numpy as np
import tensorflow as tf

from models.flowers.photos import Photos, Unusable, each, listed, read

_log = logging.getLogger("ctl.models")


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


def opened(photos: Photos, reading: Reading, size: int, trainer: ctl.Trainer) -> Images:
    """Checks every file and returns the photos that can be used. All workers must call it.

    The workers divide the files among themselves. With the cache, each worker reads all files.

    Raises UsageError if too few photos remain, and with `strict` for any file that cannot be used.
    """
    agreement, count = ctl.HostAllReduce(trainer.strategy), len(photos.paths)
    _check_same_files(photos, agreement)
    place = trainer.topology
    in_memory = reading.cache == "memory"
    mine = range(count) if in_memory else range(place.worker_index, count, place.num_workers)
    kept = np.zeros((count, size, size, 3), np.uint8) if in_memory else None
    decode = tf.function(lambda e: decoded(e, size)).get_concrete_function(
        tf.TensorSpec([], tf.string)
    )

    def look(number: int) -> str:
        try:
            image = decode(tf.constant(read(photos.paths[number], reading.max_pixels)))
        except Unusable as e:
            return str(e)
        except tf.errors.InvalidArgumentError:
            return "damaged"
        if kept is not None:
            kept[number] = image
        return ""

    faults = dict(zip(mine, each(look, mine), strict=True))
    bad = agreement.sum([bool(faults.get(i)) for i in range(count)]) > 0
    _tell(photos, bad, faults, strict=reading.strict, aloud=place.is_chief)
    rows = {part: r[~bad[r]] for part, r in photos.split(reading.split_seed).items()}
    if not all(map(len, rows.values())):
        raise ctl.UsageError(
            f"{photos.directory} has {(~bad).sum()} photos; expected at least five, since a fifth is held "
            "out for validation."
        )
    return Images(rows, _getter(photos, kept, size))


def decoded(encoded, size: int):
    """Decodes a JPEG `[]` to uint8 `[size, size, 3]`. Grey and CMYK are converted to RGB."""
    image = tf.image.resize(tf.io.decode_jpeg(encoded, channels=3), [size, size])
    return tf.cast(tf.round(image), tf.uint8)


def decoded_all(encoded, size: int, load=tf.identity):
    """Decodes JPEGs to uint8 `[b, size, size, 3]`.

    Args:
      encoded: Arguments of `load`, `[b]`.
      size: Height and width of the images (pixels).
      load: Returns an encoded JPEG `[]`. By default `encoded` contains the JPEGs.
    """
    spec = tf.TensorSpec([size, size, 3], tf.uint8)
    return tf.map_fn(lambda e: decoded(load(e), size), encoded, fn_output_signature=spec)


def _getter(photos: Photos, kept: np.ndarray | None, size: int) -> Callable:
    if kept is not None:
        images = tf.convert_to_tensor(kept)
        return lambda index: tf.gather(images, index)
    paths = tf.constant([str(p) for p in photos.paths])
    return lambda index: decoded_all(tf.gather(paths, index), size, tf.io.read_file)


def _check_same_files(photos: Photos, agreement: ctl.HostAllReduce) -> None:
    bits = [float(photos.digest() >> i & 1) for i in range(32)]
    if not set(agreement.sum(bits)) <= {0.0, float(agreement.num_workers)}:
        raise ctl.UsageError(
            f"The workers see different files in {photos.directory}; expected the same on all: put them on "
            "shared storage, or copy them again."
        )


def _tell(photos: Photos, bad: np.ndarray, faults: dict, *, strict: bool, aloud: bool) -> None:
    """Logs one warning about the files that cannot be used. Raises UsageError if the run must end."""
    names = [
        f"{photos.name(i)} ({faults.get(i) or 'says another worker'})" for i in np.flatnonzero(bad)
    ]
    names += [f"{photos.inside(path)} (not named .jpg)" for path in photos.others]
    if not names:
        return
    count = len(bad) + len(photos.others)
    text = f"{len(names)} of {count:,} files in {photos.directory} cannot be used: {listed(names)}."
    if strict:
        raise ctl.UsageError(f"{text} Mend or remove them, or leave --strict_data out.")
    gone = set(range(len(photos.classes))) - set(photos.labels[~bad])
    if gone:
        raise ctl.UsageError(f"{text} Nothing is left of {photos.classes[min(gone)]}.")
    if aloud:
        _log.warning("%s They are left out.", text)
