"""Restart policy for failed attempts, based on exit code, cause and progress.

    policy = RestartPolicy(max_restarts=3)
    decision = policy.decide(exit_code=137, step=5)
    decision.delay_secs      -> 1.0, or None with the reason in `decision.refusal`

Progress (a newer checkpoint) resets the count of restarts. Failures from outside do not count. Repeated
identical failures without progress end the job early. `RESTART_PAUSE_SECS` is for one process, or one host
of an elastic job, while the remaining ones continue. This module neither waits nor starts processes.
"""

from dataclasses import dataclass, field

from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

LONGEST_DELAY_SECS = 60.0
STUCK_ATTEMPTS = 3  # limit of identical failures without progress
OUT_OF_MEMORY_ATTEMPTS = 2
RESTART_PAUSE_SECS = (1.0, 2.0, 4.0)  # before each retry of a single process or host

# Causes of a failed attempt.
ERROR = "error"  # of the process itself: a crash, a hang, a lost peer
KILLED = "killed"  # SIGKILL from an unknown sender
OUT_OF_MEMORY = "out of memory"  # SIGKILL from the kernel
OUTSIDE = "outside"  # loss or preemption of its machine
REFUSED = "refused"  # the host cannot start it, for example because of a missing program or a wrong key


def exponential_delay_secs(first_secs: float, num_doublings: int, max_secs: float) -> float:
    """Returns a delay that doubles each time, up to a limit (seconds)."""
    return min(max_secs, first_secs * 2.0 ** min(num_doublings, 60))


@dataclass(frozen=True)
class RestartDecision:
    """Decision for another attempt after a delay, or for none.

    Attributes:
      delay_secs: Delay (seconds), None for no restart.
      is_counted: True if the restart counts against `max_restarts`.
      refusal: Reason for no restart, or "".
      should_report: True if the launcher should log the reason, because the exit code does not imply it.
    """

    delay_secs: float | None = None
    is_counted: bool = True
    refusal: str = ""
    should_report: bool = False


@dataclass(kw_only=True)
class RestartPolicy:
    """A policy with the history of the attempts of a job.

    Attributes:
      max_restarts: Maximum number of restarts without progress.
      backoff_secs: Delay before the first restart, doubled for each further one, 60 at most (seconds).
      restart_on_error: If True, restarts also after exit codes from 1 to 127, other than 2.
      has_checkpoints: True if steps are those of checkpoints.
      has_dynamic_hosts: True if the list of hosts changes, so a preempted worker does not end the job.
      restarts: Restarts since the newest progress, without those for OUTSIDE.
    """

    max_restarts: int = 3
    backoff_secs: float = 1.0
    restart_on_error: bool = False
    has_checkpoints: bool = True
    has_dynamic_hosts: bool = False
    restarts: int = field(default=0, init=False)
    _newest_step: int | None = field(default=None, init=False)  # that any attempt reached
    _delays: int = field(default=0, init=False)  # since the newest progress
    # The newest identical failures.
    _identical_failures: list[tuple[int | None, int | None, str]] = field(default_factory=list, init=False)

    def decide(
        self, exit_code: int, step: int | None, *, loss: str = ERROR, has_trained: bool = False
    ) -> RestartDecision:
        """Returns the decision after a failed attempt.

        Args:
          exit_code: Exit code of the first failed process, 128+n for signal n.
          step: Step of the newest checkpoint, None if unknown.
          loss: ERROR, KILLED, OUT_OF_MEMORY, OUTSIDE or REFUSED.
          has_trained: True if the process had begun to train. Before that, a SIGKILL may be a preemption,
            and the loss of a machine counts as a restart.
        """
        if exit_code == EXIT_PREEMPTED and self.has_dynamic_hosts:
            loss = OUTSIDE
        if loss == REFUSED and self.has_dynamic_hosts:  # the next list may contain other hosts
            loss = OUTSIDE
        progressed = step is not None and self._newest_step is not None and step > self._newest_step
        is_free = loss == OUTSIDE and (has_trained or progressed)  # a host that was never connected counts
        if progressed:
            self.restarts = self._delays = 0
            self._identical_failures.clear()
        if step is not None:
            self._newest_step = max(step, self._newest_step or 0)
        if loss == OUTSIDE or (loss == KILLED and not has_trained):
            self._identical_failures.clear()
        else:
            # the worker that runs out of memory may differ between attempts
            failure: tuple[int | None, int | None, str] = exit_code, step, loss
            if loss == OUT_OF_MEMORY:
                failure = None, None, loss
            self._identical_failures = [f for f in self._identical_failures if f == failure] + [failure]
        permanent = "" if loss == OUTSIDE else self._permanent_reason(exit_code)
        reason = permanent or self._limit_reason(is_free) or self._stuck_reason()
        if reason:
            return RestartDecision(refusal=reason, should_report=not permanent and self.max_restarts > 0)
        self.restarts += not is_free
        self._delays += 1
        delay_secs = exponential_delay_secs(self.backoff_secs, self._delays - 1, LONGEST_DELAY_SECS)
        return RestartDecision(delay_secs=delay_secs, is_counted=not is_free)

    def _permanent_reason(self, exit_code: int) -> str:
        if exit_code == EXIT_USAGE:
            return f"exit code {exit_code} is a usage error"
        if exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            return f"exit code {exit_code} reports a requested termination"
        if exit_code < 128 and not self.restart_on_error:
            return f"exit code {exit_code} is permanent (unless --restart_on_error is set)"
        return ""

    def _stuck_reason(self) -> str:
        failures = self._identical_failures
        if not self.max_restarts or not failures:
            return ""
        _, step, loss = failures[-1]
        if loss == OUT_OF_MEMORY and len(failures) >= OUT_OF_MEMORY_ATTEMPTS:
            return (
                f"out of memory {len(failures)} times in a row: use a smaller --global_batch_size or more "
                "workers, or provide more memory per worker"
            )
        if len(failures) < STUCK_ATTEMPTS:
            return ""
        if step is None:
            return f"{STUCK_ATTEMPTS} attempts in a row failed identically before the first heartbeat"
        position = f"with the newest checkpoint at step {step}" if step else "without a checkpoint"
        position = position if self.has_checkpoints else f"at step {step}"
        return f"no progress: {STUCK_ATTEMPTS} attempts in a row ended {position}"

    def _limit_reason(self, is_free: bool) -> str:
        if self.restarts < self.max_restarts or (is_free and self.max_restarts):
            return ""
        used_restarts = f"{self.restarts} restart{'s are' if self.restarts != 1 else ' is'} used up"
        return (
            f"{used_restarts} (--max_restarts={self.max_restarts})"
            if self.max_restarts
            else "--max_restarts=0"
        )
