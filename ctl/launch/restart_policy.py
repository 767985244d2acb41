"""Is a failed attempt worth another one? By its exit code, why it failed, and progress.

    policy = Policy(max_restarts=3)
    verdict = policy.after(exit_code=137, step=5)
    verdict.delay_secs      -> 1.0, or None and `verdict.why_not` says why

Progress (a newer checkpoint) gives all restarts back. What came from outside uses up none. The same
failure again and again without progress ends the job before the restarts are used up. The policy
counts; it neither waits nor starts.
"""

from dataclasses import dataclass

from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

LONGEST_DELAY_SECS = 60.0
STUCK_ATTEMPTS = 3  # that failed alike, without progress: the next would too
OUT_OF_MEMORY_ATTEMPTS = 2

# Why an attempt failed.
ERROR = "error"  # the process's own: a crash, a hang, a lost peer
KILLED = "killed"  # SIGKILL, nobody knows whose
OUT_OF_MEMORY = "out of memory"  # SIGKILL from the kernel
OUTSIDE = "outside"  # its machine was lost or taken away


@dataclass(frozen=True)
class Verdict:
    """What comes after an attempt: another one after a while, or none.

    `is_news` is for a reason that the exit code does not tell.
    """

    delay_secs: float | None = None
    why_not: str = ""
    is_news: bool = False


class Policy:
    """Decides after every attempt of one start of the launcher.

    Attributes:
      restarts: how many were granted since the newest progress, without those for OUTSIDE.
    """

    def __init__(
        self, *, max_restarts: int = 3, backoff_secs: float = 1.0, restart_on_error: bool = False,
        saves: bool = True, hosts_change: bool = False,
    ):  # fmt: skip
        """Keeps.

        Args:
          backoff_secs: before the first restart; doubled for each further one, 60 at most.
          restart_on_error: also after exit codes from 1 to 127, other than 2.
          saves: steps are those of checkpoints.
          hosts_change: hosts come and go, so that a worker that is told to leave is no end of the job.
        """
        self.max_restarts = max_restarts
        self.restarts = 0
        self._backoff_secs = backoff_secs
        self._restart_on_error = restart_on_error
        self._saves = saves
        self._hosts_change = hosts_change
        self._best: int | None = None  # the newest step that any attempt reached
        self._delays = 0  # since the newest progress
        self._alike: list[tuple] = []  # the newest failures, from the first that is like the last

    def after(
        self, exit_code: int, step: int | None, *, loss: str = ERROR, trained: bool = False
    ) -> Verdict:  # fmt: skip
        """Decides about an attempt that failed.

        Args:
          exit_code: of the first failing process, 128+n for signal n.
          step: of the newest checkpoint; None if nobody can tell how far the job is.
          loss: ERROR, KILLED, OUT_OF_MEMORY or OUTSIDE.
          trained: it had begun to train. A SIGKILL before that is taken for somebody's kill, and a
            machine that is lost before that counts as a restart.
        """
        if exit_code == EXIT_PREEMPTED and self._hosts_change:
            loss = OUTSIDE
        got_on = step is not None and self._best is not None and step > self._best
        free = loss == OUTSIDE and (trained or got_on)  # not for a machine that was never reached
        if got_on:
            self.restarts = self._delays = 0
            self._alike.clear()
        if step is not None:
            self._best = max(step, self._best or 0)
        if loss == OUTSIDE or (loss == KILLED and not trained):
            self._alike.clear()
        else:
            # whichever of several workers is noticed first: memory runs out in one or the other
            failure = (None, None, loss) if loss == OUT_OF_MEMORY else (exit_code, step, loss)
            self._alike = [f for f in self._alike if f == failure] + [failure]
        permanent = "" if loss == OUTSIDE else self._permanent(exit_code)
        why_not = permanent or self._used_up(free) or self._stuck()
        if why_not:
            return Verdict(why_not=why_not, is_news=not permanent and self.max_restarts > 0)
        self.restarts += not free
        self._delays += 1
        doubled = self._backoff_secs * 2.0 ** min(self._delays - 1, 60)
        return Verdict(delay_secs=min(LONGEST_DELAY_SECS, doubled))

    def _permanent(self, code: int) -> str:
        if code == EXIT_USAGE:
            return f"exit code {code} is a usage error"
        if code in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            return f"exit code {code} says that somebody asked for the end"
        if code < 128 and not self._restart_on_error:
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
        where = where if self._saves else f"at step {step}"
        return f"no progress: {STUCK_ATTEMPTS} attempts in a row ended {where}"

    def _used_up(self, free: bool) -> str:
        if self.restarts < self.max_restarts or (free and self.max_restarts):
            return ""
        used = f"{self.restarts} restart{'s are' if self.restarts != 1 else ' is'} used up"
        return (
            f"{used} (--max_restarts={self.max_restarts})"
            if self.max_restarts
            else "--max_restarts=0"
        )
