"""Grid of images as one picture."""

import math
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.errors import UsageError
from ctl.metrics.protocol import ImageLogged


def image_grid(step: int, name: str, images: Any) -> ImageLogged:
    """Returns an event with all images in one picture, in a nearly square grid.

    Args:
      step: Number of completed steps.
      name: Name of the picture.
      images: `[n, h, w, c]`, uint8, or floating point from 0 to 1. c is 1, 3 or 4.

    Raises:
      UsageError: The images have another shape.
    """
    array = np.asarray(images)
    if array.ndim != 4 or not len(array) or array.shape[-1] not in (1, 3, 4):
        raise UsageError(
            f"show({name!r}) got an array of shape {array.shape}; expected images [n, h, w, c] with "
            "c of 1, 3 or 4."
        )
    if array.dtype != np.uint8:
        shares = np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1)
        array = (shares * 255 + 0.5).astype(np.uint8)
    n, h, w, c = array.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    padded = np.zeros([rows * columns, h, w, c], np.uint8)
    padded[:n] = array
    picture = padded.reshape(rows, columns, h, w, c).swapaxes(1, 2).reshape(rows * h, columns * w, c)
    with tf.device("/cpu:0"):
        png = tf.io.encode_png(picture).numpy()
    return ImageLogged(step, name, png, columns * w, rows * h)
