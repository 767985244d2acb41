"""Labelled images in memory: shipped digits, an .npz file, or one folder per class."""

from pathlib import Path

import numpy as np
from ctl.errors import UsageError

from models.data import digits

HELP = (
    "Training images: shipped (6,000 digits of MNIST), an .npz with x_train, y_train, x_test, y_test, "
    "or a directory with a folder per class, or with train/ and test/ of such folders."
)
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")


def load(source: str, size: int = 32) -> tuple[dict[str, dict[str, np.ndarray]], list[str]]:
    """Returns {"train", "test"} -> {"image": uint8 `[n, h, w, c]`, "label": int64 `[n]`}, and class names.

    Pictures in folders are resized to `size` x `size` (pixels). Without folders train/ and test/, every
    tenth picture is for tests. Raises UsageError with the name of a missing or invalid file or array.
    """
    if source == "shipped":
        parts = {name: (part["image"], part["label"]) for name, part in digits.load().items()}
        return _checked(source, parts), [str(i) for i in range(10)]
    path = Path(source).expanduser()
    if path.is_dir():
        parts, names = _folders(path, size)
        return _checked(source, parts), names
    if path.suffix != ".npz" or not path.is_file():
        raise UsageError(f"--data={source} is no .npz file and no directory; expected {HELP}")
    arrays = digits.read_npz(path)
    parts = {name: (arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in ("train", "test")}
    checked = _checked(source, parts)
    count = 1 + max(int(part["label"].max(initial=0)) for part in checked.values())
    return checked, [str(i) for i in range(count)]


def _folders(path: Path, size: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    is_split = (path / "train").is_dir() and (path / "test").is_dir()
    roots = {"train": path / "train", "test": path / "test"} if is_split else {"all": path}
    names = sorted({folder.name for root in roots.values() for folder in root.iterdir() if folder.is_dir()})
    read = {name: _pictures(root, names, size) for name, root in roots.items()}
    if is_split:
        return read, names
    images, labels = read["all"]
    is_test = np.arange(len(labels)) % 10 == 9
    return {
        "train": (images[~is_test], labels[~is_test]),
        "test": (images[is_test], labels[is_test]),
    }, names


def _pictures(root: Path, names: list[str], size: int) -> tuple[np.ndarray, np.ndarray]:
    files = [
        (file, label)
        for label, name in enumerate(names)
        for file in sorted((root / name).glob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    images = np.zeros([len(files), size, size, 3], np.uint8)
    for i, (file, _) in enumerate(files):
        images[i] = _picture(file, size)
    return images, np.array([label for _, label in files], np.int64)


def _picture(file: Path, size: int) -> np.ndarray:
    import tensorflow as tf

    try:
        image = tf.io.decode_image(file.read_bytes(), channels=3, expand_animations=False)
    except (OSError, tf.errors.InvalidArgumentError) as e:
        raise UsageError(f"{file} cannot be read as a picture: {str(e).splitlines()[0]}") from None
    resized = tf.image.resize(image, [size, size], antialias=True)
    return np.asarray(tf.saturate_cast(tf.round(resized), tf.uint8))


def _checked(source: str, parts: dict) -> dict[str, dict[str, np.ndarray]]:
    checked = {}
    for name, (images, labels) in parts.items():
        images = images[..., None] if images.ndim == 3 else images  # noqa: PLW2901
        is_image = images.ndim == 4 and images.dtype == np.uint8 and images.shape[-1] in (1, 3, 4)
        if not is_image or labels.shape != images.shape[:1]:
            raise UsageError(
                f"--data={source} has images {list(images.shape)} of {images.dtype} and labels "
                f"{list(labels.shape)} for {name}; expected uint8 [n, h, w] or [n, h, w, c], and [n]."
            )
        if not len(labels):
            raise UsageError(f"--data={source} has no images for {name}; expected {HELP}")
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
            raise UsageError(f"--data={source} has labels {labels[:3]}; expected whole numbers from 0.")
        checked[name] = {"image": images, "label": labels.astype(np.int64)}
    return checked
