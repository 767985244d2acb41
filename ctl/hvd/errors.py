"""What collectives raise, under the names that scripts catch."""

from ctl.collectives.errors import HorovodInternalError
from ctl.errors import CtlError, UsageError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "RefusedError",
    "UsageError",
]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went; `elastic.run` goes on from where it is, with a new set of ranks.

    Attributes:
      skip_sync: nothing was added, so nobody needs the state of the others.
    """

    def __init__(self, skip_sync: bool):
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Never raised: nothing here is compiled against a version of TensorFlow. Kept for `except`."""


class RefusedError(CtlError, NotImplementedError):
    """A part of the API that exists, and refuses with what to do instead."""
