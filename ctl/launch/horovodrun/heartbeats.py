"""Signs of life of the ranks of this machine, so that one that is stopped or hangs is found.

    beats = Heartbeats(timeout_secs=60.0)
    environ |= beats.told(task)
    hang = beats.hung(ranks)            # None, or who and why
    beats.close()

A rank beats from `hvd.init()` on, once a second (`ctl.supervision.heartbeat`). Before, and in programs
that never call it, only one that the kernel calls stopped is found. Ranks of other machines are not
seen from here.
"""

import itertools
import shutil
import tempfile
from pathlib import Path

from ctl.distribute.cluster import Cluster
from ctl.launch.heartbeats import Hang, Pulse, Timeouts
from ctl.launch.horovodrun.ranks import Ranks
from ctl.launch.roles import log_name
from ctl.supervision.heartbeat import VARIABLE

TIMEOUT_SECS = 60.0
_NO_STEPS = " (last at step 0)"  # ranks do not count them


class Heartbeats:
    """Those of one job.

    Args:
      timeout_secs: of silence until a rank counts as hung; 0 for never.
    """

    def __init__(self, timeout_secs: float = TIMEOUT_SECS):
        self._timeout_secs = timeout_secs
        self._dir = Path(tempfile.mkdtemp(prefix="ctl-heartbeat-"))
        self._pulse = Pulse(self._dir, Timeouts(heartbeat=timeout_secs, hang=0.0, startup=0.0))
        self._pulse.begin([])
        self._looks = itertools.count()  # before its first beat a rank may be idle, but not stopped

    def told(self, task: Cluster) -> dict[str, str]:
        """What a process is to find in its environment."""
        return {VARIABLE: str(self._pulse.path(task))} if self._timeout_secs else {}

    def hung(self, ranks: Ranks) -> Hang | None:
        """The first rank that is silent for too long; looks twice a second at most."""
        if not self._timeout_secs or not self._pulse.is_due:
            return None
        stopped = ranks.stopped
        found = self._pulse.look(
            ranks.tasks, stopped, ranks.tasks,
            lambda: {log_name(t): 0 if t in stopped else next(self._looks) for t in ranks.tasks},
        )  # fmt: skip
        if found is None:
            return None
        why = found.why.removesuffix(_NO_STEPS)
        return Hang(found.task, why, found.silent_secs)

    def close(self) -> None:
        """Deletes the files."""
        shutil.rmtree(self._dir, ignore_errors=True)
