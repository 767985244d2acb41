"""Paths with common methods: `pathlib.Path` for local files, `UrlPath` for URLs.

    directory = paths.path("gs://bucket/run") / "checkpoints"
    paths.has_rename(directory)                        # False for an object store
    paths.write_atomically(directory / "a.json", text) # readers get the old or the new text

Object stores are URLs, paths below /gcs/, mounts of object stores (`ctl.io.mounts`), and the directories in
the environment variable CTL_OBJECT_STORES (separated by colons). TensorFlow accesses URLs. It is
imported at the first access. Errors are OSErrors in both cases.
"""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from ctl.io import mounts
from ctl.setting_values import check_type

STORES = "CTL_OBJECT_STORES"
_MOUNTED = "/gcs/"  # mount of object stores on Vertex AI, where a rename is a copy and not atomic
_BLOCK_BYTES = 1 << 20
_PADDED_BYTES = 1 << 10
PAUSES_SECS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # between attempts to read
_PERMANENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}
_AT_FDCWD, _EXCHANGE = -100, 2  # arguments of renameat2(2)
T = TypeVar("T")
_log = logging.getLogger("ctl")


@dataclass(frozen=True, order=True)
class UrlPath:
    """A URL with the methods of `pathlib.Path` that ctl uses."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "UrlPath":
        """URL without its last component."""
        return UrlPath(self.url.rstrip("/").rpartition("/")[0])

    def exists(self) -> bool:
        """Returns True for an existing file or directory."""
        with os_errors(self):
            return _gfile().exists(self.url)

    def is_dir(self) -> bool:
        """Returns True for an existing directory."""
        with os_errors(self):
            return _gfile().isdir(self.url)

    def is_file(self) -> bool:
        """Returns True for an existing file."""
        return self.exists() and not self.is_dir()

    def iterdir(self) -> Iterator["UrlPath"]:
        """Lists the directory and returns an iterator over its content."""
        with os_errors(self):
            names = _gfile().listdir(self.url)
        return iter([self / name.rstrip("/") for name in names if name.rstrip("/")])

    def read_bytes(self) -> bytes:
        """Returns the content of the file."""
        return read_file(self)

    def write_bytes(self, data: bytes) -> None:
        """Replaces the content of the file."""
        with os_errors(self), _gfile().GFile(self.url, "wb") as file:
            file.write(data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the file."""
        if missing_ok and not self.exists():
            return
        with os_errors(self):
            _gfile().remove(self.url)

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Creates the directory and its parents. The arguments are ignored."""
        with os_errors(self):
            _gfile().makedirs(self.url)

    def stat(self) -> Any:
        """Returns an object with `st_size` (bytes) and `st_mtime_ns` (nanoseconds)."""
        with os_errors(self):
            status = _gfile().stat(self.url)
        return SimpleNamespace(st_size=status.length, st_mtime_ns=status.mtime_nsec)


AnyPath = Path | UrlPath


def path(where: str | os.PathLike[str]) -> AnyPath:
    """Returns a `UrlPath` for a string with "://", otherwise a `pathlib.Path`."""
    check_type("path", where, str | os.PathLike[str])
    text = os.fspath(where)
    return UrlPath(text) if "://" in text else Path(text)


def is_url(where: str | os.PathLike[str] | None) -> bool:
    """Returns True for a URL such as `gs://bucket/run`."""
    return where is not None and isinstance(path(where), UrlPath)


def has_rename(where: AnyPath) -> bool:
    """Returns True if a directory can be renamed atomically. Object stores do not support this."""
    if not isinstance(where, Path):
        return False
    stores = [p for p in os.environ.get(STORES, "").split(os.pathsep) if p]
    absolute = where.absolute()
    if any(absolute.is_relative_to(p) for p in (_MOUNTED, *stores)):
        return False
    return not mounts.is_object_store(os.path.realpath(absolute))


def read_blocks(where: AnyPath) -> Iterator[bytes]:
    """Yields the content of a file in blocks of 1 MiB. Raises OSError, also for a truncated read."""
    if not isinstance(where, Path):
        with os_errors(where), _gfile().GFile(where.url, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
        return
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFile(errno.EINVAL, "is not a regular file", str(where))
        num_missing = status.st_size
        while block := os.read(descriptor, _BLOCK_BYTES):
            num_missing -= len(block)
            yield block
        if num_missing > 0:
            raise OSError(errno.EIO, f"the last {num_missing} bytes were not delivered", str(where))
    finally:
        os.close(descriptor)


class NotAFile(OSError):
    """Error for a pipe, a socket or a device instead of a file. A read could block forever."""


def read_file(where: AnyPath) -> bytes:
    """Returns the content of a file; see `read_blocks`."""
    return b"".join(read_blocks(where))


def is_permanent_error(error: OSError) -> bool:
    """Returns False for an error of a disk or a network that may be temporary, such as a full disk."""
    return isinstance(error, NotAFile) or error.errno in _PERMANENT


def call_with_retries(
    function: Callable[[], T],
    pauses_secs: Sequence[float] = PAUSES_SECS,
    *,
    is_permanent: Callable[[OSError], bool] = is_permanent_error,
    where: AnyPath | None = None,
) -> T:
    """Calls a function, and repeats the call after an OSError that may be temporary.

    Args:
      function: The function.
      pauses_secs: Pauses before the second and later calls (seconds).
      is_permanent: Returns True for errors that are raised without a retry, such as a missing file.
      where: Path for warnings about errors without a path.

    Returns:
      The result of the function.
    """
    for pause in pauses_secs:
        try:
            return function()
        except OSError as e:
            if is_permanent(e):
                raise
            prefix = f"{where}: " if where is not None and e.filename is None else ""
            _log.warning("%s%s. Trying again in %g s.", prefix, str(e).rstrip("."), pause)
        time.sleep(pause)
    return function()


def write_atomically(where: AnyPath, text: str, *, durable: bool = False) -> None:
    """Replaces the content of a small file. An OSError leaves the old content unchanged.

    With `durable`, the new content is synced to the disk before it replaces the old one. On file systems
    without rename, the text is padded with spaces to the length of the old text, and written with one call.
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
    """Replaces a file or a directory with another one. For directories this is atomic on Linux only."""
    aside = old.with_name(f".{old.name}.replaced")  # may exist if a process was killed in this function
    if not old.is_dir() or old.is_symlink():
        os.replace(new, old)
        shutil.rmtree(aside, ignore_errors=True)
        return
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux only
    if exchange and exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
        shutil.rmtree(new)
        return
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside)


def remove_tree(where: AnyPath) -> None:
    """Deletes a directory and its content. Raises OSError.

    Listings of a mounted object store may be outdated, so unlisted files may remain.
    """
    if isinstance(where, Path):
        if has_rename(where):
            shutil.rmtree(where)
        else:
            _remove_listed(where)
        return
    with os_errors(where):
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


def copy_tree(source: AnyPath, destination: AnyPath, last: str = "") -> None:
    """Replaces a file or a directory with a copy of another one, for file systems without rename.

    `last` is the name of the file that marks a directory as complete. It is deleted first and written last.
    """
    if source.is_file():
        destination.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source, destination)
        return
    if last:
        (destination / last).unlink(missing_ok=True)
    if destination.exists():
        remove_tree(destination)
    destination.mkdir(parents=True, exist_ok=True)
    entries: list[AnyPath] = [*source.iterdir()]
    for path in sorted(entries, key=lambda p: (p.name == last, p.name)):
        copy_tree(path, destination / path.name, last)


def _copy_file(source: AnyPath, destination: AnyPath) -> None:
    opened = (
        destination.open("wb") if isinstance(destination, Path) else _gfile().GFile(destination.url, "wb")
    )
    with os_errors(destination), opened as file:
        for block in read_blocks(source):
            file.write(block)


def sync(where: AnyPath) -> None:
    """Waits until a local file or directory is written to the disk. A no-op for URLs."""
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
    """Creates a directory, and writes, syncs and deletes a file of `num_bytes` in it. Raises OSError."""
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


def free_bytes(where: AnyPath) -> int | None:
    """Returns the free space for this user on the disk of `where` (bytes), or None if it is unknown.

    The path does not have to exist.
    """
    if not has_rename(where):
        return None
    with contextlib.suppress(OSError):
        existing = Path(where).absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        usage = shutil.disk_usage(existing)
        return usage.free if usage.total else None
    return None


def free_inodes(where: AnyPath) -> int | None:
    """Returns the number of files that this user can create on the disk, or None if it is unknown."""
    if not isinstance(where, Path):
        return None
    with contextlib.suppress(OSError):
        usage = os.statvfs(where)
        return usage.f_favail if usage.f_files else None
    return None


def total_bytes(where: AnyPath) -> float:
    """Returns the size of the disk of a directory (bytes), or infinity if it is unknown."""
    with contextlib.suppress(OSError):
        if has_rename(where):
            return shutil.disk_usage(Path(where)).total or float("inf")
    return float("inf")


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile


@contextlib.contextmanager
def os_errors(where: AnyPath) -> Iterator[None]:
    """Converts TensorFlow's errors within the block to OSErrors that name `where`."""
    try:
        yield
    except Exception as e:
        tf = sys.modules.get("tensorflow")
        if tf is None or not isinstance(e, tf.errors.OpError):
            raise
        numbers = {
            tf.errors.NotFoundError: errno.ENOENT,
            tf.errors.ResourceExhaustedError: errno.ENOSPC,
            tf.errors.PermissionDeniedError: errno.EACCES,
            tf.errors.AlreadyExistsError: errno.EEXIST,
        }
        raise OSError(numbers.get(type(e), errno.EIO), e.message, str(where)) from None
