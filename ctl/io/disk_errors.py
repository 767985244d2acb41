"""Classification of disk errors.

try: ...
except OSError as e:
    if disk_errors.is_transient(e): ...     # exit code 134: a restart may succeed
"""

import errno

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TRANSIENT = _FULL | {
    getattr(errno, name)
    for name in (
        "EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EBUSY", "EINTR", "EMFILE", "ENFILE", "ENOMEM", "ENOTCONN",
        "ECONNREFUSED", "ECONNRESET", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO",
        "ENOLINK",
    )
    if hasattr(errno, name)
}  # fmt: skip


def is_full(error: OSError) -> bool:
    """Returns True for a full disk and for an exceeded quota."""
    return error.errno in _FULL


def is_transient(error: OSError) -> bool:
    """Returns True for an error of a disk or a network that may be temporary, such as a full disk."""
    return error.errno in _TRANSIENT
