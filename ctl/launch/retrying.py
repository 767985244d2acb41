"""Is a failed attempt worth another one? By its exit code, the number of restarts, and progress.

    policy = Policy(max_restarts=3)
    verdict = policy.after(exit_code=137, step=5)
    verdict.delay_secs      -> 1.0, or None and `verdict.why_not` says why

The policy counts; it neither waits nor starts.
"""

from dataclasses import dataclass

from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

LONGEST_DELAY_SECS = 60.0
STUCK_ATTEMPTS = 3  # that ended at the same step: the next would too


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
      restarts: how many were granted.
    """

    def __init__(
        self, *, max_restarts: int = 3, backoff_secs: float = 1.0, restart_on_error: bool = False,
        saves: bool = True,
    ):  # fmt: skip
        """Keeps.

        Args:
          backoff_secs: before the first restart; doubled for each further one, 60 at most.
          restart_on_error: also after exit codes from 1 to 127, other than 2.
          saves: steps are those of checkpoints.
        """
        self.max_restarts = max_restarts
        self.restarts = 0
        self._backoff_secs = backoff_secs
        self._restart_on_error = restart_on_error
        self._saves = saves
        self._steps: list[int | None] = []

    def after(self, exit_code: int, step: int | None) -> Verdict:
        """Decides about an attempt that failed.

        Args:
          exit_code: of the first failing process, 128+n for signal n.
          step: of the newest checkpoint; None if nobody can tell how far the job is.
        """
        self._steps.append(step)
        permanent = self._permanent(exit_code)
        why_not = permanent or self._stuck() or self._used_up()
        if why_not:
            return Verdict(why_not=why_not, is_news=not permanent and self.max_restarts > 0)
        self.restarts += 1
        doubled = self._backoff_secs * 2.0 ** min(self.restarts - 1, 60)
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
        last = self._steps[-STUCK_ATTEMPTS:]
        if (
            not self.max_restarts
            or len(last) < STUCK_ATTEMPTS
            or None in last
            or len(set(last)) > 1
        ):
            return ""
        where = (
            f"with the newest checkpoint at step {last[0]}" if last[0] else "without a checkpoint"
        )
        where = where if self._saves else f"at step {last[0]}"
        return f"no progress: {STUCK_ATTEMPTS} attempts in a row ended {where}"

    def _used_up(self) -> str:
        if self.restarts < self.max_restarts:
            return ""
        used = f"{self.restarts} restart{'s are' if self.restarts != 1 else ' is'} used up"
        return (
            f"{used} (--max_restarts={self.max_restarts})"
            if self.max_restarts
            else "--max_restarts=0"
        )
