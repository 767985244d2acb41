"""Checksums of files and texts: "crc32c:<hex digits>" or, in older checkpoints, "sha256:<hex digits>"."""

import hashlib
from collections.abc import Iterable

import google_crc32c
from ctl.io.paths import AnyPath, read_blocks

CRC32C = "crc32c"


def compute_checksum(chunks: Iterable[bytes], like: str = CRC32C) -> str:
    """Returns the checksum of the concatenated chunks.

    Args:
      chunks: Pieces of the content.
      like: Name of the algorithm, or a checksum that was computed with it.

    Raises:
      ValueError: For an unknown algorithm.
    """
    algorithm = like.partition(":")[0]
    if algorithm == "sha256":
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        return f"sha256:{digest.hexdigest()}"
    if algorithm != CRC32C:
        raise ValueError(f"unknown checksum algorithm {algorithm!r}; expected {CRC32C} or sha256")
    value = 0
    for chunk in chunks:
        value = google_crc32c.extend(value, chunk)
    return f"{CRC32C}:{value:08x}"


def compute_file_checksum(path: AnyPath, like: str = CRC32C) -> str:
    """Returns the checksum of a file; see `compute_checksum`. Raises OSError if it cannot be read."""
    return compute_checksum(read_blocks(path), like)
