"""Images of 28 x 28 pixels in ten classes: shipped MNIST, an .npz, idx files, or Keras's download."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from ctl.errors import UsageError

SHIPPED = Path(__file__).with_name("mnist_small.npz")
HELP = (
    "Images to learn: shipped (5,000 + 1,000 of MNIST), keras (downloads all of MNIST), an .npz file "
    "with x_train, y_train, x_test, y_test, or a directory of idx files (train-images-idx3-ubyte, "
    "also .gz)."
)
_KEYS = ("x_train", "y_train", "x_test", "y_test")
_IDX = {
    "x_train": "train-images-idx3-ubyte", "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte", "y_test": "t10k-labels-idx1-ubyte",
}  # fmt: skip


def load(source: str = "shipped") -> dict[str, dict[str, np.ndarray]]:
    """Returns {"train", "test"} -> {"image": uint8 `[n, 28, 28]`, "label": int64 `[n]`}.

    Raises UsageError with the name of a missing or invalid file or key.
    """
    if source == "keras":
        import tensorflow as tf

        (x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
        arrays = dict(zip(_KEYS, (x_train, y_train, x_test, y_test), strict=True))
    else:
        path = SHIPPED if source == "shipped" else Path(source).expanduser()
        arrays = _idx(path) if path.is_dir() else read_npz(path)
    return {
        part: _checked(source, arrays[f"x_{part}"], arrays[f"y_{part}"])
        for part in ("train", "test")
    }


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Returns x_train, y_train, x_test and y_test. Raises UsageError for a missing file or key."""
    if not path.is_file():
        raise UsageError(
            f"--data={path} is neither a file nor a directory; expected {HELP[HELP.index('shipped') :]}"
        )
    try:
        with np.load(path, allow_pickle=False) as content:
            missing = [k for k in _KEYS if k not in content]
            if missing:
                raise UsageError(
                    f"{path} has no {', '.join(missing)}; expected the keys {', '.join(_KEYS)} and "
                    f"found {', '.join(content.files) or 'none'}."
                )
            return {k: content[k] for k in _KEYS}
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f"{path} cannot be read as .npz: {e}.") from None


def _idx(directory: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for key, name in _IDX.items():
        for path in (directory / name, directory / f"{name}.gz"):
            if path.is_file():
                arrays[key] = _read_idx(path)
                break
        else:
            raise UsageError(
                f"{directory} has no {name} (or {name}.gz); expected the four idx files."
            )
    return arrays


def _read_idx(path: Path) -> np.ndarray:
    """Reads an idx file: two zero bytes, type 8 (uint8), number of axes, sizes of the axes, data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, type_code, axes = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
        if zero or type_code != 8:
            raise ValueError("it does not begin as idx of unsigned bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as e:
        raise UsageError(f"{path} cannot be read as an idx file: {e}.") from None


def _checked(source: str, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    if images.ndim != 3 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise UsageError(
            f"--data={source} has images {images.shape} and labels {labels.shape}; expected "
            "[n, 28, 28] and [n]."
        )
    if not (images.dtype == np.uint8 and np.issubdtype(labels.dtype, np.integer)):
        raise UsageError(
            f"--data={source} has images of {images.dtype} and labels of {labels.dtype}; expected uint8 "
            "from 0 to 255 and whole numbers."
        )
    if labels.size and not (labels.min() >= 0 and labels.max() <= 9):
        raise UsageError(f"--data={source} has labels up to {labels.max()}; expected 0 to 9.")
    return {"image": images, "label": labels.astype(np.int64)}
