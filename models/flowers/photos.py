"""Search, split and check of photos in folders, one folder per class, identical on every worker.

found = photos.find("flower_photos")
found.classes                     # ("daisy", "dandelion", "roses", "sunflowers", "tulips")
found.split(seed=123)             # {"train": numbers of photos, "test": the other fifth}
"""

import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TypeVar

import numpy as np
from ctl.errors import UsageError

SUFFIXES = (".jpg", ".jpeg")
THREADS = 16  # more than cores, as a mounted bucket has a high latency
_NAMED = 10  # number of files in a message
_KINDS = {b"\x89PNG": "a PNG", b"GIF8": "a GIF", b"RIFF": "a WebP", b"BM": "a BMP"}
_NO_SIZE = (0xC4, 0xC8, 0xCC)  # markers in the range of frame headers that contain no size
Result = TypeVar("Result")


class Unusable(Exception):
    """Error for a file that cannot be used, with the reason as message."""


@dataclass(frozen=True)
class Photos:
    """The files of a directory, sorted by class and name.

    Attributes:
      directory: Directory with the class folders.
      classes: Names of the class folders, sorted.
      paths: Paths of the photos.
      labels: Indices in `classes`, int64 `[n]`.
      others: Files in the class folders that are not named as JPEGs.
    """

    directory: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: np.ndarray
    others: tuple[Path, ...] = ()

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
    _refuse_url("data_dir", data_dir)
    directory = Path(data_dir).expanduser()
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UsageError(
            f"--data_dir={data_dir} {what}; expected a directory with a folder of JPEGs per class, such as "
            "an extracted flower_photos.tgz."
        )
    folders = _folders(directory)
    if len(folders) == 1 and _folders(folders[0]):
        directory = folders[0]  # flower_photos/flower_photos, as Keras extracts archives
        folders = _folders(directory)
    found = {folder.name: _photos_in(folder) for folder in folders}
    if not any(found.values()):
        raise UsageError(f"{directory} has no folder with .jpg files; expected one per class.")
    empty = [name for name, paths in found.items() if not paths]
    if empty:
        raise UsageError(
            f"{directory} has folders without any .jpg file: {', '.join(empty)}; expected photos in "
            "each class. Remove them, or add photos."
        )
    if len(found) == 1:
        raise UsageError(
            f"{directory} has one class, {folders[0].name}; expected at least two folders of photos."
        )
    paths = tuple(path for group in found.values() for path in group)
    labels = [label for label, group in enumerate(found.values()) for _ in group]
    others = tuple(path for folder in folders for path in _files_in(folder) if not _is_named(path))
    return Photos(directory, tuple(found), paths, np.array(labels, np.int64), others)


def matching(images: str) -> list[Path]:
    """Returns the files of `--images`: paths, patterns and directories of JPEGs, separated by commas."""
    _refuse_url("images", images)
    found: list[Path] = []
    for word in (w.strip() for w in images.split(",")):
        path = Path(word).expanduser()
        if not word:
            continue
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if _is_named(p))
            more = [p for p in below if not p.name.startswith(".")]
        else:
            more = [path] if path.exists() else [Path(p) for p in sorted(glob(str(path)))]
        if not more:
            raise UsageError(
                f"--images={images}: nothing is there for {word!r}; expected paths, patterns such as "
                "'photos/*.jpg', or a directory."
            )
        found += more
    if not found:
        raise UsageError("--mode=predict needs --images=photo.jpg, 'photos/*.jpg' or a directory.")
    return found


def read(path: Path, max_pixels: int) -> bytes:
    """Returns the content of a JPEG file. Raises Unusable for an invalid file, without decoding it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("not a file")
        if status.st_size > 3 * max_pixels:
            raise Unusable(f"{status.st_size:,} bytes")
        content = path.read_bytes()
    except OSError as e:
        raise Unusable(e.strerror or str(e)) from None
    if not content:
        raise Unusable("empty")
    if not content.startswith(b"\xff\xd8\xff"):
        kind = next((k for magic, k in _KINDS.items() if content.startswith(magic)), "not a JPEG")
        raise Unusable(kind)
    pixels = _pixels(content)
    if pixels > max_pixels:
        raise Unusable(f"{pixels:,} pixels")
    return content


def each(function: Callable[[int], Result], numbers: Sequence[int]) -> list[Result]:
    """Returns the results of `function` for all numbers, in order. Several threads call the function."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(function, numbers))


def listed(names: Sequence[str]) -> str:
    """Returns a text with the first names and the number of further names."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _folders(directory: Path) -> list[Path]:
    """Returns the folders of a directory, sorted, except hidden folders and links to a parent directory.

    Such a link would be a class that contains all classes.
    """
    here = directory.resolve()
    return sorted(
        p for p in directory.iterdir()
        if p.is_dir() and not p.name.startswith(".") and not here.is_relative_to(p.resolve())
    )  # fmt: skip


def _photos_in(folder: Path) -> list[Path]:
    return [p for p in _files_in(folder) if _is_named(p)]


def _files_in(folder: Path) -> list[Path]:
    """Returns the files of a folder, sorted, except hidden files."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and not p.is_dir())


def _is_named(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _refuse_url(flag: str, text: str) -> None:
    scheme, found, place = text.partition("://")
    if found:
        mounted = f"On Vertex AI, and wherever the bucket is mounted, write /gcs/{place}." if (
            scheme == "gs") else "Mount it, or copy the photos here."  # fmt: skip
        raise UsageError(f"--{flag}={text} is a URL; expected a path. {mounted}")


def _pixels(content: bytes) -> int:
    """Returns height times width from the frame header of a JPEG, or 0 if there is no valid header."""
    at = 2
    while at + 9 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD7:
            at += 1 if marker == 0xFF else 2
            continue
        length, _, height, width = struct.unpack_from(">HBHH", content, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            return height * width
        at += 2 + length
    return 0
