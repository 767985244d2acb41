"""Heartbeat files of the processes of a job, stored independently of a full disk.

    store = BeatStore(directory)
    path = store.path("job_0.log")            # the process writes to this path
    store.read("job_0.log")

A process of this machine gets a file in memory (memfd), which it opens through /proc. It needs no disk, and
a deleted directory does not affect it. A process of another machine writes `directory/job_0.TOKEN-1.json`,
with a token of the launcher and the number of the attempt, because a process on a host without a network
connection continues to write while its successor runs.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from ctl.supervision.beat_file import MEMORY_FILE_PREFIX

_MAX_BYTES = 4096


class BeatStore:
    """The heartbeat files of one job, by the name of the log of each process."""

    def __init__(self, directory: Path | None):
        """Stores the directory of the files of other machines, or None if they cannot access one."""
        self._directory = directory
        self._temporary: Path | None = None
        self._token = secrets.token_hex(4)
        self._attempt = 0
        self._descriptors: dict[str, int] = {}  # files in memory
        self._paths: dict[str, Path] = {}  # other files

    def begin_attempt(self) -> None:
        """Assigns new paths to the files of other machines."""
        self._attempt += 1
        for path in self._paths.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._paths.clear()

    def path(self, name: str, *, is_remote: bool = False) -> Path:
        """Returns the path that the process writes to. Creates the file in memory of a local process."""
        if name not in self._descriptors and name not in self._paths:
            descriptor = None if is_remote else _memory_file(name)
            if descriptor is None:
                self._paths[name] = self._disk_path(name)
            else:
                self._descriptors[name] = descriptor
        if name in self._descriptors:
            return Path(f"/proc/{os.getpid()}/fd/{self._descriptors[name]}")
        return self._paths[name]

    def read(self, name: str) -> bytes:
        """Returns the content of a file, or b"" if it is empty or cannot be read."""
        with contextlib.suppress(OSError):
            if name in self._descriptors:
                return os.pread(self._descriptors[name], _MAX_BYTES, 0)
            if name in self._paths:
                return self._paths[name].read_bytes()
        return b""

    def clear(self, name: str) -> None:
        """Empties a file, which keeps its path."""
        with contextlib.suppress(OSError):
            if name in self._descriptors:
                os.ftruncate(self._descriptors[name], 0)
            elif name in self._paths:
                self._paths[name].unlink(missing_ok=True)

    def release(self, name: str) -> None:
        """Closes a file and removes it from the store."""
        self._paths.pop(name, None)
        if name in self._descriptors:
            os.close(self._descriptors.pop(name))

    def close(self) -> None:
        """Releases all files."""
        for name in [*self._descriptors]:
            self.release(name)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _disk_path(self, name: str) -> Path:
        directory = self._directory
        with contextlib.suppress(OSError):
            if directory is None:
                self._temporary = self._temporary or Path(tempfile.mkdtemp(prefix="ctl-heartbeat-"))
                directory = self._temporary
            directory.mkdir(parents=True, exist_ok=True)
        directory, stem = directory or Path(tempfile.gettempdir()), name.removesuffix(".log")
        with contextlib.suppress(OSError):
            for earlier in directory.glob(f"{stem}.*json"):
                earlier.unlink(missing_ok=True)
        return directory / f"{stem}.{self._token}-{self._attempt}.json"


def _memory_file(name: str) -> int | None:
    """Returns the descriptor of a file in memory that other processes can open, or None if that fails."""
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(MEMORY_FILE_PREFIX + name.replace(".log", ""), os.MFD_CLOEXEC)
        try:
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
            return descriptor
        except OSError:
            os.close(descriptor)
    return None
