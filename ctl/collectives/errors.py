"""What the engine raises."""

from ctl.errors import UsageError


class HorovodInternalError(RuntimeError):
    """A collective failed because another rank is gone; `elastic.run` goes on from the last commit."""


class PortInUseError(UsageError):
    """This rank cannot listen at its port, because another program does."""
