"""Files of photos: search by name, and checks of their contents."""

import json
import stat
import struct
from glob import glob
from pathlib import Path

import tensorflow as tf
from ctl.errors import UsageError

SUFFIXES = (".jpg", ".jpeg")
_FORMATS = {b"\x89PNG": "a PNG", b"GIF8": "a GIF", b"RIFF": "a WebP", b"BM": "a BMP"}
_NO_SIZE = (0xC4, 0xC8, 0xCC)  # markers in the range of frame headers that contain no size


class UnusableError(Exception):
    """Error for a file that cannot be used, with the reason as message."""


def check_is_path(flag: str, text: str) -> None:
    """Raises UsageError if the value of a flag is a URL."""
    scheme, separator, path = text.partition("://")
    if separator:
        fix = "Mount it, or copy the photos here."
        if scheme == "gs":
            fix = f"On Vertex AI, and wherever the bucket is mounted, write /gcs/{path}."
        raise UsageError(f"--{flag}={text} is a URL; expected a path. {fix}")


def has_jpeg_name(path: Path) -> bool:
    """Returns True for the suffixes .jpg and .jpeg."""
    return path.suffix.lower() in SUFFIXES


def list_files(folder: Path) -> list[Path]:
    """Returns the files of a folder, sorted, except hidden files."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and not p.is_dir())


def find_images(images: str) -> list[Path]:
    """Returns the files of `--images`: paths, patterns and directories of JPEGs, separated by commas."""
    check_is_path("images", images)
    paths: list[Path] = []
    for pattern in filter(None, (part.strip() for part in images.split(","))):
        path = Path(pattern).expanduser()
        if path.is_dir():
            jpegs = sorted(p for p in path.rglob("*") if has_jpeg_name(p))
            matches = [p for p in jpegs if not p.name.startswith(".")]
        else:
            matches = [path] if path.exists() else [Path(p) for p in sorted(glob(str(path)))]
        if not matches:
            raise UsageError(
                f"--images={images}: no file matches {pattern!r}; expected paths, patterns such as "
                "'photos/*.jpg', or a directory."
            )
        paths += matches
    if not paths:
        raise UsageError("--mode=predict needs --images=photo.jpg, 'photos/*.jpg' or a directory.")
    return paths


def read_config(model_dir: str | None) -> dict:
    """Returns the settings of the run in `model_dir`, or {} if there is none."""
    path = f"{model_dir}/config.json"
    if not model_dir or not tf.io.gfile.exists(path):
        return {}
    try:
        return json.loads(tf.io.read_file(path).numpy())
    except ValueError:
        return {}


def read(path: Path, max_pixels: int) -> bytes:
    """Returns the content of a JPEG file. Raises UnusableError for an invalid file, without decoding it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError("not a file")
        if status.st_size > 3 * max_pixels:
            raise UnusableError(f"{status.st_size:,} bytes")
        content = path.read_bytes()
    except OSError as e:
        raise UnusableError(e.strerror or str(e)) from None
    if not content:
        raise UnusableError("empty")
    if not content.startswith(b"\xff\xd8\xff"):
        names = (name for magic, name in _FORMATS.items() if content.startswith(magic))
        raise UnusableError(next(names, "not a JPEG"))
    pixels = _pixels(content)
    if pixels > max_pixels:
        raise UnusableError(f"{pixels:,} pixels")
    return content


def _pixels(content: bytes) -> int:
    """Returns height times width from the frame header of a JPEG, or 0 if there is no valid header."""
    offset = 2
    while offset + 9 <= len(content) and content[offset] == 0xFF:
        marker = content[offset + 1]
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD7:
            offset += 1 if marker == 0xFF else 2
            continue
        length, _, height, width = struct.unpack_from(">HBHH", content, offset + 2)
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            return height * width
        offset += 2 + length
    return 0
