"""Checksums of files and texts, as "crc32c:<8 hex digits>"; those of before, "sha256:<hex>", are read."""

import hashlib
from collections.abc import Iterable

import google_crc32c
from ctl.io.paths import AnyPath, blocks

KIND = "crc32c"


def of(content: Iterable[bytes], like: str = KIND) -> str:
    """The checksum of pieces of bytes, of the kind that the checksum (or word) `like` is.

    Raises ValueError for a kind that is not known.
    """
    kind = like.partition(":")[0]
    if kind == "sha256":
        digest = hashlib.sha256()
        for block in content:
            digest.update(block)
        return f"sha256:{digest.hexdigest()}"
    if kind != KIND:
        raise ValueError(f"a checksum of the unknown kind {kind!r}")
    value = 0
    for block in content:
        value = google_crc32c.extend(value, block)
    return f"{KIND}:{value:08x}"


def of_file(path: AnyPath, like: str = KIND) -> str:
    """The checksum of a file; raises OSError."""
    return of(blocks(path), like)
