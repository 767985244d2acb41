"""What one `ctlrun` is to do, however many processes it has meanwhile."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ctl.launch.horovodrun.output import Output
from ctl.launch.processes import Exit
from ctl.launch.ssh import Door

GRACE_SECS = 30.0  # from a signal that is passed on to SIGKILL
FAILED_SECS = 10.0  # the same after a failure: what remains has lost a peer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command, and what each of its processes is told.

    Attributes:
      told: variables for the collectives; far: for processes on other machines, beside them.
      binds_gpus: each sees the GPU of its local rank only; says: what is started, and where.
      heartbeat_timeout_secs: of silence until a rank counts as hung; 0 for never.
      private: known to the processes of this job and to nobody else.
    """

    command: Sequence[str]
    output: Output
    told: Mapping[str, str] = field(default_factory=dict)
    far: Mapping[str, str] = field(default_factory=dict)
    door: Door | None = None
    binds_gpus: bool = False
    says: bool = False
    heartbeat_timeout_secs: float = 60.0
    private: Mapping[str, str] = field(
        default_factory=lambda: {"CTL_HVD_SECRET": secrets.token_hex(32)}
    )


def how(end: Exit) -> str:
    """How a process ended, in words that follow its name."""
    return end.why or (f"was ended by {end}" if end.signal_name else f"failed: {end}")


def lost_a_peer(last_words: str) -> bool:
    """Whether the last line of a traceback only says that another rank is gone."""
    return any(name in last_words for name in ("HorovodInternalError", "LostRankError"))
