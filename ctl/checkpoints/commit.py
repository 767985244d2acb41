"""A checkpoint directory is complete or it is not there.

    ckpt-400/
      state.index, state.data-00000-of-00001    tf.train.Checkpoint(...).read(".../ckpt-400/state")
      manifest.json                             written last; without it this is no checkpoint

Everything is written under a temporary name, synced, and renamed.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ctl.checkpoints.protocol import Manifest
from ctl.errors import CheckpointError

STATE = "state"
MANIFEST = "manifest.json"
_NAME = re.compile(r"ckpt-(\d+)")
_LEFT_OVER = re.compile(r"(tmp-ckpt-\d+|workertemp_\d+)(_temp)?")


def write(directory: Path, manifest: Manifest, write_state: Callable[[str], object]) -> Path:
    """Commits `directory/ckpt-<step>`; on any error nothing of it is left.

    Args:
      write_state: writes the tensors to files that start with the prefix it is given.
    """
    final = directory / f"ckpt-{manifest.step}"
    temporary = directory / f"tmp-ckpt-{manifest.step}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write_state(str(temporary / STATE))
        names = sorted(p.name for p in temporary.iterdir())
        files = {
            n: {"size": (temporary / n).stat().st_size, "checksum": checksum(temporary / n)}
            for n in names
        }
        for name in names:
            _sync(temporary / name)
        (temporary / MANIFEST).write_text(manifest.with_files(files).to_json(), encoding="utf-8")
        _sync(temporary / MANIFEST)
        _sync(temporary)
        if final.exists():
            remove(final)
        temporary.rename(final)
        _sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def scan(directory: Path) -> list[tuple[Path, Manifest]]:
    """Committed checkpoints, oldest first. Directories without a readable manifest are not listed."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.step == int(match[1]):
            found.append((path, manifest))
    return sorted(found, key=lambda pair: pair[1].step)


def uncommitted(directory: Path) -> list[Path]:
    """Directories named like checkpoints whose manifest is missing or damaged."""
    good = {path for path, _ in scan(directory)}
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(p for p in paths if _NAME.fullmatch(p.name) and p.is_dir() and p not in good)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory; raises CheckpointError."""
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {e}.") from None
    return Manifest.from_json(text, str(path / MANIFEST))


def verify(path: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    if not manifest.files:
        return "the manifest lists no files"
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes, expected {expected['size']}"
        if checksum(file) != expected["checksum"]:
            return f"{name} has another checksum than when it was written"
    return None


def checksum(path: Path) -> str:
    """sha256 of a file, as "sha256:<hex>"."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def remove(path: Path) -> None:
    """Deletes a checkpoint so that a half-deleted one is never listed."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def sweep(directory: Path) -> list[str]:
    """Deletes what interrupted saves left in a checkpoint directory; returns the names."""
    left = (
        [p for p in directory.iterdir() if _LEFT_OVER.fullmatch(p.name)]
        if directory.is_dir()
        else []
    )
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [p.name for p in left]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
