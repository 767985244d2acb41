"""Photos in folders, one folder per class: found, split and looked at, the same way on every worker.

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
THREADS = 16  # more than cores: a mounted bucket answers slowly
_NAMED = 10  # files that a message names
_KINDS = {b"\x89PNG": "a PNG", b"GIF8": "a GIF", b"RIFF": "a WebP", b"BM": "a BMP"}
_NO_SIZE = (0xC4, 0xC8, 0xCC)  # markers among those of frames that hold none
Result = TypeVar("Result")


class Unusable(Exception):
    """What is wrong with one file."""


@dataclass(frozen=True)
class Photos:
    """The files of a directory, sorted by class and name.

    Attributes:
      directory: that holds the class folders; classes: their names, sorted.
      paths: of the files; labels: int64 `[n]`, places in `classes`.
      others: files beside them that are named otherwise.
    """

    directory: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: np.ndarray
    others: tuple[Path, ...] = ()

    def split(self, seed: int) -> dict[str, np.ndarray]:
        """Four fifths to train, one to test; those of Keras' `image_dataset_from_directory`."""
        order = np.arange(len(self.paths))
        np.random.RandomState(seed).shuffle(order)
        held_out = len(order) // 5
        return {"train": order[: len(order) - held_out], "test": order[len(order) - held_out :]}

    def name(self, number: int) -> str:
        """`roses/12.jpg`."""
        return self.inside(self.paths[number])

    def inside(self, path: Path) -> str:
        """A path without that of the directory."""
        return str(path.relative_to(self.directory))

    def digest(self) -> int:
        """32 bits that differ where the names differ."""
        return zlib.crc32(b"\0".join(os.fsencode(self.name(i)) for i in range(len(self.paths))))


def find(data_dir: str) -> Photos:
    """The JPEG files below `data_dir`; hidden files and folders are left out.

    Raises UsageError for what is no directory with two or more folders of photos.
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
    """The files of `--images`: paths and patterns with commas, a directory for all JPEGs below it."""
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
    """A JPEG as it is in its file; raises Unusable with what is wrong, before anything is decoded."""
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
    """The results of `function` for all numbers, in order, computed by several threads."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(function, numbers))


def listed(names: Sequence[str]) -> str:
    """Some names, and how many more."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _folders(directory: Path) -> list[Path]:
    """Sorted; a link that leads back up would be a class that holds all the others, and is left out."""
    here = directory.resolve()
    return sorted(
        p for p in directory.iterdir()
        if p.is_dir() and not p.name.startswith(".") and not here.is_relative_to(p.resolve())
    )  # fmt: skip


def _photos_in(folder: Path) -> list[Path]:
    return [p for p in _files_in(folder) if _is_named(p)]


def _files_in(folder: Path) -> list[Path]:
    """Sorted, without hidden ones."""
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
    """Height times width, from the header of the frame; 0 if it cannot be found."""
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
