"""Claim files: short exclusive access to a file, also for processes of several machines.

    with claim_file_lock(path):
        ...                          # reads and replaces the file

The other processes wait until the block ends.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_CLAIM_SECS = 10.0  # age at which the claim of a process that died is removed


@contextlib.contextmanager
def claim_file_lock(path: Path) -> Iterator[None]:
    """Excludes other processes, also on other machines, for a short time.

    The claim file of a process that died within the block is removed after `_CLAIM_SECS`.

    Args:
      path: The file that is written in the block.
    """
    claim, previous, changed_secs = path.with_name(f".{path.name}-claim"), (0, 0), time.monotonic()
    while True:
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            break
        except FileExistsError:
            identity = _file_identity(claim)
            if identity != previous:
                previous, changed_secs = identity, time.monotonic()
            elif time.monotonic() - changed_secs > _CLAIM_SECS:
                with contextlib.suppress(OSError):
                    claim.unlink()
            time.sleep(0.02)
        except OSError:  # the write in the block reports the error of the disk
            yield
            return
    own_identity = _file_identity(claim)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _file_identity(claim) == own_identity:
                claim.unlink()


def _file_identity(path: Path) -> tuple[int, int]:
    """Returns (inode, change time), because inodes are reused. (0, 0) if the file does not exist."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_ctime_ns
    return 0, 0
