"""Paths of two kinds with the same methods: local ones are `pathlib.Path`, URLs are `UrlPath`.

    directory = paths.path("gs://bucket/run") / "checkpoints"
    paths.has_rename(directory)            # False: what is to be whole must be marked last
    paths.write_whole(directory / "a.json", text)    # readers see the old text or the new one

What counts as an object store: URLs, paths below /gcs/, mounts of a type that is known to be one, and
what the variable CTL_OBJECT_STORES names (directories with a colon between them).

URLs go through TensorFlow's file systems, which is imported when the first one is touched. Errors are
OSErrors in both cases.
"""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

STORES = "CTL_OBJECT_STORES"
_MOUNTED = "/gcs/"  # where Vertex AI mounts object stores as files: rename copies, and is not atomic
_TYPES = {
    "fuse",  # of a program that does not say its name, such as the bucket driver of Google's clusters
    "fuse.gcsfuse", "fuse.s3fs", "fuse.mountpoint-s3", "fuse.goofys", "fuse.geesefs", "fuse.blobfuse",
    "fuse.blobfuse2", "fuse.rclone", "fuse.ossfs", "fuse.cosfs", "fuse.obsfs",
}  # fmt: skip
_BLOCK_BYTES = 1 << 20
_PADDED_BYTES = 1 << 10
PAUSES_SECS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # between attempts to read
_LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
T = TypeVar("T")
_log = logging.getLogger("ctl")


@dataclass(frozen=True, order=True)
class UrlPath:
    """Those methods of `pathlib.Path` that are used here, for a URL."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "UrlPath":
        return UrlPath(self.url.rstrip("/").rpartition("/")[0])

    def exists(self) -> bool:
        with _os_errors(self):
            return _gfile().exists(self.url)

    def is_dir(self) -> bool:
        with _os_errors(self):
            return _gfile().isdir(self.url)

    def is_file(self) -> bool:
        return self.exists() and not self.is_dir()

    def iterdir(self) -> Iterator["UrlPath"]:
        with _os_errors(self):
            names = _gfile().listdir(self.url)
        return iter([self / name.rstrip("/") for name in names if name.rstrip("/")])

    def read_bytes(self) -> bytes:
        return read_file(self)

    def write_bytes(self, data: bytes) -> None:
        with _os_errors(self), _gfile().GFile(self.url, "wb") as file:
            file.write(data)

    def unlink(self, missing_ok: bool = False) -> None:
        if missing_ok and not self.exists():
            return
        with _os_errors(self):
            _gfile().remove(self.url)

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        with _os_errors(self):
            _gfile().makedirs(self.url)

    def stat(self) -> Any:
        """`st_size` in bytes, `st_mtime_ns` in nanoseconds."""
        with _os_errors(self):
            found = _gfile().stat(self.url)
        return SimpleNamespace(st_size=found.length, st_mtime_ns=found.mtime_nsec)


AnyPath = Path | UrlPath


def path(where: str | os.PathLike) -> AnyPath:
    """The path for a text: a URL has "://" in it."""
    text = os.fspath(where)
    return UrlPath(text) if "://" in text else Path(text)


def is_url(where: str | os.PathLike | None) -> bool:
    """True for `gs://bucket/run` and the like."""
    return where is not None and isinstance(path(where), UrlPath)


def has_rename(where: AnyPath) -> bool:
    """True if a directory can be renamed in one go; not in object stores, mounted or by URL."""
    if not isinstance(where, Path):
        return False
    named = [p for p in os.environ.get(STORES, "").split(os.pathsep) if p]
    here = where.absolute()
    if any(here.is_relative_to(p) for p in (_MOUNTED, *named)):
        return False
    return _mount_type(os.path.realpath(here)) not in _TYPES


def _mount_type(where: str) -> str:
    """The type of the file system that a path without links is on, as "ext4"; "" if nobody knows."""
    found = ("", "")
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as file:
        for line in file:
            source, target, kind = os.fsdecode(line).split(" ")[:3]
            program, sharp, _ = source.partition("#")
            for octal in ("\\040", "\\011", "\\012", "\\134"):
                target = target.replace(octal, chr(int(octal[1:], 8)))
            inside = f"{where}/".startswith(f"{target.rstrip('/')}/")
            if inside and len(target) >= len(found[0]):
                found = (target, f"fuse.{program}" if kind == "fuse" and sharp else kind)
    return found[1]


def blocks(where: AnyPath) -> Iterator[bytes]:
    """The content of a file, piece by piece; raises OSError, also where it ends before its length."""
    if not isinstance(where, Path):
        with _os_errors(where), _gfile().GFile(where.url, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
        return
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotAFile(errno.EINVAL, "is not a regular file", str(where))
        left = found.st_size
        while block := os.read(descriptor, _BLOCK_BYTES):
            left -= len(block)
            yield block
        if left > 0:
            raise OSError(errno.EIO, f"the last {left} bytes were not delivered", str(where))
    finally:
        os.close(descriptor)


class NotAFile(OSError):
    """A pipe, a socket or a device is where a file is expected; to read it could take for ever."""


def read_file(where: AnyPath) -> bytes:
    """All that `blocks` gives."""
    return b"".join(blocks(where))


def is_lasting(error: OSError) -> bool:
    """False for an error of a disk or a network that may pass by itself, such as one that is full."""
    return isinstance(error, NotAFile) or error.errno in _LASTING


def persistently(
    act: Callable[[], T],
    pauses_secs: Sequence[float] = PAUSES_SECS,
    *,
    is_lasting: Callable[[OSError], bool] = is_lasting,
    where: AnyPath | None = None,
) -> T:
    """What `act` returns; where it raises an OSError that may pass, it is called again after a pause.

    A file that is not there, or is no file, is not waited for. Warnings name `where` for an error without
    a path. Raises what the last call raised.
    """
    for pause in pauses_secs:
        try:
            return act()
        except OSError as e:
            if is_lasting(e):
                raise
            place = f"{where}: " if where is not None and e.filename is None else ""
            _log.warning("%s%s. Trying again in %g s.", place, str(e).rstrip("."), pause)
        time.sleep(pause)
    return act()


def write_whole(where: AnyPath, text: str, *, durable: bool = False) -> None:
    """Gives a small file a new text; raises OSError, and then the old one is still there.

    Where a file cannot be renamed over another, blanks at the end keep the length, and all is written
    in one piece. `durable`: the new text is on the disk before it takes the place of the old one.
    """
    if not isinstance(where, Path):
        where.write_bytes(text.encode())
    elif has_rename(where):
        mark = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        temporary = where.with_name(f".{where.name}-{mark}")
        try:
            temporary.write_text(text, encoding="utf-8")
            if durable:
                sync(temporary)
            os.replace(temporary, where)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    else:
        descriptor = os.open(where, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            content = text.encode()
            length = max(os.fstat(descriptor).st_size, -(-len(content) // _PADDED_BYTES) * _PADDED_BYTES)
            os.pwrite(descriptor, content.ljust(length), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(new: Path, old: Path) -> None:
    """Moves a file or a directory over another; one is always there, for directories on Linux only."""
    aside = old.with_name(f".{old.name}.replaced")  # what a process that was killed here has left
    if not old.is_dir() or old.is_symlink():
        os.replace(new, old)
        shutil.rmtree(aside, ignore_errors=True)
        return
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux
    if exchange and exchange(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
        shutil.rmtree(new)
        return
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside)


def remove_tree(where: AnyPath) -> None:
    """Deletes a directory and all in it; raises OSError.

    In a mounted object store, whose listings may be old, what is not listed may stay.
    """
    if isinstance(where, Path):
        if has_rename(where):
            shutil.rmtree(where)
        else:
            _remove_listed(where)
        return
    with _os_errors(where):
        _gfile().rmtree(where.url)


def _remove_listed(where: Path) -> None:
    for path in where.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_listed(path)
        else:
            path.unlink(missing_ok=True)
    try:
        where.rmdir()
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def copy_tree(source: AnyPath, goal: AnyPath, last: str = "") -> None:
    """Copies a file or a directory to where nothing can be renamed, in place of what is there.

    The file called `last`, without which a directory counts for nothing, is deleted first and written
    last.
    """
    if source.is_file():
        goal.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source, goal)
        return
    if last:
        (goal / last).unlink(missing_ok=True)
    if goal.exists():
        remove_tree(goal)
    goal.mkdir(parents=True, exist_ok=True)
    inside: list[AnyPath] = [*source.iterdir()]
    for path in sorted(inside, key=lambda p: (p.name == last, p.name)):
        copy_tree(path, goal / path.name, last)


def _copy_file(source: AnyPath, goal: AnyPath) -> None:
    opened = goal.open("wb") if isinstance(goal, Path) else _gfile().GFile(goal.url, "wb")
    with _os_errors(goal), opened as file:
        for block in blocks(source):
            file.write(block)


def sync(where: AnyPath) -> None:
    """Waits until a local file or directory is on the disk."""
    if not isinstance(where, Path):
        return
    descriptor = os.open(where, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not where.is_dir():  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def probe(directory: AnyPath, num_bytes: int) -> None:
    """Writes and syncs a file of `num_bytes` in a directory, which is made; raises OSError.

    A disk that is full, or has no inode left, may well make an empty file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    where = directory / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        if not isinstance(where, Path):
            where.write_bytes(b"\1" * min(num_bytes, _BLOCK_BYTES))
            return
        with where.open("wb", buffering=0) as file:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                file.write(b"\1" * min(_BLOCK_BYTES, num_bytes - start))
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):
            where.unlink(missing_ok=True)


def bytes_free(where: AnyPath) -> int | None:
    """For this user on the disk of `where`, or of what is there of it; None if nobody knows."""
    if not has_rename(where):
        return None
    with contextlib.suppress(OSError):
        there = Path(where).absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        usage = shutil.disk_usage(there)
        return usage.free if usage.total else None
    return None


def inodes_free(where: AnyPath) -> int | None:
    """Returns how many more files this user can create on the disk of `where`, or None if unknown."""
    if not isinstance(where, Path):
        return None
    with contextlib.suppress(OSError):
        usage = os.statvfs(where)
        return usage.f_favail if usage.f_files else None
    return None


def bytes_in_total(where: AnyPath) -> float:
    """Returns the size of the disk of a directory, infinite if it is unknown."""
    with contextlib.suppress(OSError):
        if has_rename(where):
            return shutil.disk_usage(Path(where)).total or float("inf")
    return float("inf")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


@contextlib.contextmanager
def _os_errors(where: AnyPath) -> Iterator[None]:
    """TensorFlow's errors of file systems as OSErrors."""
    if isinstance(where, Path):
        yield
        return
    import tensorflow as tf

    numbers = {
        tf.errors.NotFoundError: errno.ENOENT,
        tf.errors.ResourceExhaustedError: errno.ENOSPC,
        tf.errors.PermissionDeniedError: errno.EACCES,
        tf.errors.AlreadyExistsError: errno.EEXIST,
    }
    try:
        yield
    except tf.errors.OpError as e:
        raise OSError(numbers.get(type(e), errno.EIO), e.message, str(where)) from None
