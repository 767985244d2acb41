"""Evaluator process, which evaluates each checkpoint that the chief saves.

TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}' \\
    python -m models.mnist --model_dir=/shared/mnist

It runs the program of the workers. It reads `model_dir/checkpoints` and does not write there.
"""

import logging
import signal

from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import WatchedCheckpoints
from ctl.errors import CtlError, Stopped
from ctl.io import paths
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, RunEnd
from ctl.supervision import signals
from ctl.supervision.lease import LOCK_NAME, Lease
from ctl.supervision.process_identity import process_start_time
from ctl.training import evaluation
from ctl.training.active_run import ActiveRun
from ctl.training.checkpoint_follower import Evaluated, Following
from ctl.training.default_writers import default_writers
from ctl.training.loop import Interrupted
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions

EVALUATED = "evaluated.json"
NUMBERS = "evaluations.jsonl"
_log = logging.getLogger("ctl")


def follow(prepared: PreparedTrainer, options: RunOptions) -> dict[str, float]:
    """Evaluates until the training has ended.

    Returns:
      The newest means as "eval_<name>".

    Raises:
      Stopped: After a signal.
      PeerLostError: If the training died or is not complete.
    """
    directory, watched = paths.path(prepared.config.model_dir), prepared.checkpointing.manager
    assert isinstance(watched, WatchedCheckpoints)
    following = Following(
        watched, Lease(directory / LOCK_NAME), Evaluated(directory / EVALUATED), born=process_start_time()
    )
    means: dict[str, float] = {}
    received = signals.Signals()

    def evaluate(manifest: Manifest) -> None:
        watched.restore(prepared.state, manifest.step)
        means.clear()
        try:
            means.update(evaluation.evaluate_trainer(prepared, options).means)
            prepared.callbacks.raise_failure()
        except Interrupted:
            raise _stopped(received, following) from None

    writers = _writers(prepared.config.model_dir, options)
    end, detail = RunEnd.FAILED, ""
    _log.info("Evaluating each checkpoint in %s after its save.", watched.directory)
    try:
        with received, prepared.activity.running(ActiveRun(writers, received)):
            detail = following.run(evaluate, lambda: received.received is not None)
        if received.received is not None:
            raise _stopped(received, following)
        end = RunEnd.TRAINING_ENDED
    except CtlError as e:
        is_stopped = isinstance(e, Stopped)
        end, detail = (RunEnd.SIGNAL, "") if is_stopped else (RunEnd.FAILED, type(e).__name__)
        raise
    finally:
        summary = {"evaluations": following.count, "numbers": str(directory / NUMBERS)}
        writers.note(Ended(following.step or 0, end, summary, detail=detail))
    return {f"eval_{k}": v for k, v in means.items()}


def _stopped(received: signals.Signals, following: Following) -> Stopped:
    number = received.received or signal.SIGTERM
    return Stopped(
        f"Stopped by {signals.signal_name(number)} after {following.count} evaluations; the same command "
        "continues from there.",
        signals.exit_code(number),
    )


def _writers(model_dir: str, options: RunOptions) -> WriterGroup:
    """Returns the user's writers, or the default ones with the evaluator's own metrics file."""
    if options.writers is not None:
        return WriterGroup(options.writers)
    return WriterGroup(default_writers(model_dir, options.log_dir, metrics_file=NUMBERS))
