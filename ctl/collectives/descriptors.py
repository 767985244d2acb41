"""Check of the limit for open files before the ranks connect.

Without this check, a rank that cannot open a socket would treat the error as a network error and retry for
a minute.
"""

import contextlib
import errno
import os
import resource

from ctl.errors import UsageError

_PER_CONNECTION = 4  # connection, memory file and two temporary descriptors
_PER_PROCESS = 10  # listener, socket pairs, handshakes in flight


def check_descriptors(num_connections: int) -> None:
    """Raises UsageError if this process cannot open the files that connections to other ranks need."""
    count = _PER_CONNECTION * (num_connections + 1) + _PER_PROCESS
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            scope = f"`ulimit -n` is {limit}" if e.errno == errno.EMFILE else "the limit of this machine"
            raise UsageError(
                f"this process cannot open the {count} additional files that {num_connections} "
                f"connections to other ranks need ({scope}). Raise the limit, for example with "
                "`ulimit -n 4096`."
            ) from None
