"""Search and split of photos in folders, one folder per class, identical on all workers.

flower_photos = photos.find("flower_photos")
flower_photos.classes                     # ("daisy", "dandelion", "roses", "sunflowers", "tulips")
flower_photos.split(seed=123)             # {"train": numbers of photos, "test": the other fifth}
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ctl.errors import UsageError

from models.flowers.files import check_is_path, has_jpeg_name, list_files

_MAX_LISTED = 10  # number of files in a message


@dataclass(frozen=True)
class Photos:
    """The files of a directory, sorted by class and name.

    Attributes:
      directory: Directory with the class folders.
      classes: Names of the class folders, sorted.
      paths: Paths of the photos.
      labels: Indices in `classes`, int64 `[n]`.
      other_files: Files in the class folders that are not named as JPEGs.
    """

    directory: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: np.ndarray
    other_files: tuple[Path, ...] = ()

    def split(self, seed: int) -> dict[str, np.ndarray]:
        """Returns {"train", "test"} -> numbers of photos, in the ratio 4 to 1.

        The split is that of `image_dataset_from_directory` of Keras.
        """
        order = np.arange(len(self.paths))
        np.random.RandomState(seed).shuffle(order)
        held_out = len(order) // 5
        return {"train": order[: len(order) - held_out], "test": order[len(order) - held_out :]}

    def name(self, number: int) -> str:
        """Returns the path of a photo inside the directory, such as `roses/12.jpg`."""
        return self.inside(self.paths[number])

    def inside(self, path: Path) -> str:
        """Returns a path relative to the directory."""
        return str(path.relative_to(self.directory))

    def digest(self) -> int:
        """Returns a checksum of the names of the photos, 32 bits."""
        return zlib.crc32(b"\0".join(os.fsencode(self.name(i)) for i in range(len(self.paths))))


def find(data_dir: str) -> Photos:
    """Returns the JPEG files below `data_dir`, except hidden files and folders.

    Raises UsageError unless `data_dir` is a directory with at least two folders, each with photos.
    """
    check_is_path("data_dir", data_dir)
    directory = Path(data_dir).expanduser()
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise UsageError(
            f"--data_dir={data_dir} {problem}; expected a directory with a folder of JPEGs per class, such "
            "as an extracted flower_photos.tgz."
        )
    folders = _folders(directory)
    if len(folders) == 1 and _folders(folders[0]):
        directory = folders[0]  # flower_photos/flower_photos, as Keras extracts archives
        folders = _folders(directory)
    paths_by_class = {f.name: [p for p in list_files(f) if has_jpeg_name(p)] for f in folders}
    if not any(paths_by_class.values()):
        raise UsageError(f"{directory} has no folder with .jpg files; expected one per class.")
    empty = [name for name, paths in paths_by_class.items() if not paths]
    if empty:
        raise UsageError(
            f"{directory} has folders without any .jpg file: {', '.join(empty)}; expected photos in "
            "each class. Remove them, or add photos."
        )
    if len(paths_by_class) == 1:
        raise UsageError(
            f"{directory} has one class, {folders[0].name}; expected at least two folders of photos."
        )
    all_paths = tuple(path for paths in paths_by_class.values() for path in paths)
    labels = [label for label, paths in enumerate(paths_by_class.values()) for _ in paths]
    other_files = tuple(p for folder in folders for p in list_files(folder) if not has_jpeg_name(p))
    return Photos(directory, tuple(paths_by_class), all_paths, np.array(labels, np.int64), other_files)


def list_names(names: Sequence[str]) -> str:
    """Returns a text with the first names and the number of further names."""
    num_omitted = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {num_omitted:,} more" if num_omitted > 0 else "")


def _folders(directory: Path) -> list[Path]:
    """Returns the folders of a directory, sorted, except hidden folders and links to a parent directory.

    Such a link would be a class that contains all classes.
    """
    resolved = directory.resolve()
    return sorted(
        p for p in directory.iterdir()
        if p.is_dir() and not p.name.startswith(".") and not resolved.is_relative_to(p.resolve())
    )  # fmt: skip
