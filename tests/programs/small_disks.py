"""File systems that are quickly full. Needs root and Linux; the test is skipped elsewhere."""

import contextlib
import errno
import subprocess

import pytest


@contextlib.contextmanager
def mounted(place, size):
    """A new file system of `size`, such as "4m", in the directory `place`."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=30, check=False)
    except OSError as e:
        pytest.skip(f"mount: {e}")
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], timeout=30, check=False)


def fill(path):
    """Writes a file until not a byte more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as e:
                assert e.errno == errno.ENOSPC
