"""Small file systems that fill up quickly. Needs root and Linux; elsewhere the test is skipped."""

import contextlib
import errno
import subprocess

import pytest


@contextlib.contextmanager
def mounted(directory, size):
    """Mounts a new file system of `size`, such as "4m", in `directory`."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    try:
        result = subprocess.run(mount, capture_output=True, timeout=30, check=False)
    except OSError as e:
        pytest.skip(f"mount: {e}")
    if result.returncode:
        pytest.skip(f"mount: {result.stderr.decode()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], timeout=30, check=False)


def fill(path):
    """Writes a file until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as e:
                assert e.errno == errno.ENOSPC
