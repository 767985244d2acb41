"""Check of the limit for open files before the ranks connect.

Without this check, a rank that cannot open a socket would treat the error as a network error and retry for
a minute.
"""

import contextlib
import errno
import os
import resource

from ctl.errors import UsageError

_PER_LINK = 4  # connection, memory file and two temporary descriptors
_MIN_PROPOSAL = 4096
_PER_PROCESS = 10  # listener, socket pairs, handshakes in flight


def check_descriptors(num_links: int, num_controls: int) -> None:
    """Raises UsageError if this process cannot open the files that connections to other ranks need.

    Args:
      num_links: Number of links for data.
      num_controls: Number of connections to the coordinator, or of the coordinator.
    """
    count = _PER_LINK * (num_links + 1) + num_controls + _PER_PROCESS
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
                f"this process cannot open the {count} additional files that "
                f"{num_links + num_controls} connections to other ranks need ({scope}). Raise the limit, "
                f"for example with `ulimit -n {max(_MIN_PROPOSAL, 2 * count)}`."
            ) from None
