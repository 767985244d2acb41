"""Restart policy for failed attempts, based on exit code, cause and progress.

    policy = RestartPolicy(max_restarts=3)
    decision = policy.after(exit_code=137, step=5)
    decision.delay_secs      -> 1.0, or None with the reason in `decision.why_not`

Progress (a newer checkpoint) resets the count of restarts. Failures from outside do not count. Repeated
identical failures without progress end the job early. `RESTART_PAUSE_SECS` is for one process, or one host
of an elastic job, while the remaining ones continue. This module neither waits nor starts processes.
"""

from dataclasses import dataclass, field

from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

LONGEST_DELAY_SECS = 60.0
STUCK_ATTEMPTS = 3  # limit of identical failures without progress
OUT_OF_MEMORY_ATTEMPTS = 2
RESTART_PAUSE_SECS = (1.0, 2.0, 4.0)  # before a single process or host is retried; then no more

# Causes of a failed attempt.
ERROR = "error"  # of the process itself: a crash, a hang, a lost peer
KILLED = "killed"  # SIGKILL from an unknown sender
OUT_OF_MEMORY = "out of memory"  # SIGKILL from the kernel
OUTSIDE = "outside"  # its machine was lost or preempted
REFUSED = "refused"  # it cannot be started on its host, such as for a missing program or a wrong key


def doubled_secs(first_secs: float, times: int, most_secs: float) -> float:
    """Returns a delay that doubles each time, up to a limit (seconds)."""
    return min(most_secs, first_secs * 2.0 ** min(times, 60))


@dataclass(frozen=True)
class RestartDecision:
    """Decision for another attempt after a delay, or for none.

    Attributes:
      delay_secs: Delay (seconds), None for no restart.
      is_counted: True if the restart counts against `max_restarts`.
      why_not: Reason for no restart.
      is_news: True if the exit code alone does not give the reason.
    """

    delay_secs: float | None = None
    is_counted: bool = True
    why_not: str = ""
    is_news: bool = False


@dataclass(kw_only=True)
class RestartPolicy:
    """A policy with the history of the attempts of a job.

    Attributes:
      max_restarts: Maximum number of restarts without progress.
      backoff_secs: Delay before the first restart, doubled for each further one, 60 at most (seconds).
      restart_on_error: If True, restarts also after exit codes from 1 to 127, other than 2.
      saves: True if steps are those of checkpoints.
      hosts_change: True if the list of hosts changes, so a preempted worker does not end the job.
      restarts: Restarts since the newest progress, without those for OUTSIDE.
    """

    max_restarts: int = 3
    backoff_secs: float = 1.0
    restart_on_error: bool = False
    saves: bool = True
    hosts_change: bool = False
    restarts: int = field(default=0, init=False)
    _newest_step: int | None = field(default=None, init=False)  # that any attempt reached
    _delays: int = field(default=0, init=False)  # since the newest progress
    # The newest identical failures.
    _alike: list[tuple[int | None, int | None, str]] = field(default_factory=list, init=False)

    def after(
        self, exit_code: int, step: int | None, *, loss: str = ERROR, trained: bool = False
    ) -> RestartDecision:
        """Returns the decision after a failed attempt.

        Args:
          exit_code: Exit code of the first failed process, 128+n for signal n.
          step: Step of the newest checkpoint, None if unknown.
          loss: ERROR, KILLED, OUT_OF_MEMORY, OUTSIDE or REFUSED.
          trained: True if it had begun to train. A SIGKILL before that may be a preemption, and a machine
            that is lost before that counts as a restart.
        """
        if exit_code == EXIT_PREEMPTED and self.hosts_change:
            loss = OUTSIDE
        if loss == REFUSED and self.hosts_change:  # the next list may contain other hosts
            loss = OUTSIDE
        progressed = step is not None and self._newest_step is not None and step > self._newest_step
        free = loss == OUTSIDE and (trained or progressed)  # a host that was never connected counts
        if progressed:
            self.restarts = self._delays = 0
            self._alike.clear()
        if step is not None:
            self._newest_step = max(step, self._newest_step or 0)
        if loss == OUTSIDE or (loss == KILLED and not trained):
            self._alike.clear()
        else:
            # any of several workers may be detected first, because memory runs out in one or another
            failure: tuple[int | None, int | None, str] = exit_code, step, loss
            if loss == OUT_OF_MEMORY:
                failure = None, None, loss
            self._alike = [f for f in self._alike if f == failure] + [failure]
        permanent = "" if loss == OUTSIDE else self._permanent(exit_code)
        why_not = permanent or self._used_up(free) or self._stuck()
        if why_not:
            return RestartDecision(why_not=why_not, is_news=not permanent and self.max_restarts > 0)
        self.restarts += not free
        self._delays += 1
        delay_secs = doubled_secs(self.backoff_secs, self._delays - 1, LONGEST_DELAY_SECS)
        return RestartDecision(delay_secs=delay_secs, is_counted=not free)

    def _permanent(self, code: int) -> str:
        if code == EXIT_USAGE:
            return f"exit code {code} is a usage error"
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            return f"exit code {code} says that somebody asked for the end"
        if code < 128 and not self.restart_on_error:
            return f"exit code {code} is permanent (--restart_on_error restarts all the same)"
        return ""

    def _stuck(self) -> str:
        last = self._alike
        if not self.max_restarts or not last:
            return ""
        _, step, loss = last[-1]
        if loss == OUT_OF_MEMORY and len(last) >= OUT_OF_MEMORY_ATTEMPTS:
            return (
                f"out of memory {len(last)} times in a row: use a smaller --global_batch_size or more "
                "workers, or give each more memory"
            )
        if len(last) < STUCK_ATTEMPTS:
            return ""
        if step is None:
            return f"{STUCK_ATTEMPTS} attempts in a row failed alike, before the first sign of life"
        where = f"with the newest checkpoint at step {step}" if step else "without a checkpoint"
        where = where if self.saves else f"at step {step}"
        return f"no progress: {STUCK_ATTEMPTS} attempts in a row ended {where}"

    def _used_up(self, free: bool) -> str:
        if self.restarts < self.max_restarts or (free and self.max_restarts):
            return ""
        used = f"{self.restarts} restart{'s are' if self.restarts != 1 else ' is'} used up"
        return f"{used} (--max_restarts={self.max_restarts})" if self.max_restarts else "--max_restarts=0"
