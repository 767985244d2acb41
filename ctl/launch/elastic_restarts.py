"""Consequences of failures in an elastic job: a new process, a restart of all, or the end.

policy = WorkerPolicy(RestartPolicy(max_restarts=3), model_dir)
policy.restart_delay_secs(process_exit, has_trained=True)      # 1.0, or None
"""

from pathlib import Path

from ctl.errors import EXIT_USAGE
from ctl.io.console import print_message
from ctl.launch.process import ProcessExit
from ctl.launch.progress import newest_step
from ctl.launch.restart_policy import REFUSED, RestartPolicy


class FailurePolicy:
    """Policy of `ctlrun`: no failure is permanent, and no job is restarted."""

    def is_permanent(self, process_exit: ProcessExit) -> bool:
        """Returns True for a failure that ends the job, because a new process would fail, too."""
        return False

    def restart_delay_secs(self, cause: ProcessExit, *, has_trained: bool) -> float | None:
        """Returns the delay before all processes are started again (seconds), or None for no restart.

        Called when no process remains that has the state of the job.

        Args:
          cause: The first failure.
          has_trained: True if processes had the state.
        """
        return None


class WorkerPolicy(FailurePolicy):
    """Policy of `ctl launch`: exit codes of errors end the job; a job without workers is restarted.

    Args:
      policy: Limits of the restarts.
      model_dir: Directory of the checkpoints, if known.
    """

    def __init__(self, policy: RestartPolicy, model_dir: Path | None):
        self._policy, self._model_dir = policy, model_dir

    def is_permanent(self, process_exit: ProcessExit) -> bool:
        """Returns True for the exit codes of errors, except with `restart_on_error`."""
        code = process_exit.returncode
        is_error = code == EXIT_USAGE or (0 < code <= 127 and not self._policy.restart_on_error)
        return is_error and process_exit.loss != REFUSED  # another host may accept the login

    def restart_delay_secs(self, cause: ProcessExit, *, has_trained: bool) -> float | None:
        """Returns the delay that the restart policy determines, or None. Reports the decision."""
        step = newest_step(self._model_dir)
        decision = self._policy.decide(
            cause.exit_code,
            0 if step is None and self._model_dir else step,
            loss=cause.loss,
            has_trained=has_trained,
        )
        if decision.delay_secs is None:
            print_message(f"{decision.refusal}; not restarting")
        else:
            used = f"{self._policy.restarts} of {self._policy.max_restarts}"
            print_message(
                f"restart {used} in {decision.delay_secs:g} s: no worker with the state of the job remains"
            )
        return decision.delay_secs
