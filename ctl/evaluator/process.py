r"""Evaluator process, which evaluates each checkpoint that the chief saves.

TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}' \
    python -m models.mnist --model_dir=/shared/mnist

It runs the program of the workers. It reads `model_dir/checkpoints` and does not write there.
"""

import logging
import signal
from collections.abc import Callable, Mapping

from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import WatchedCheckpoints
from ctl.errors import CtlError, Stopped
from ctl.evaluator.checkpoint_follower import Evaluated, Following
from ctl.io import paths
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, RunEnd
from ctl.supervision import signals
from ctl.supervision.lease import LOCK_NAME, Lease
from ctl.supervision.process_identity import process_start_time

EVALUATED = "evaluated.json"
NUMBERS = "evaluations.jsonl"
_log = logging.getLogger("ctl")


def follow(
    model_dir: str,
    watched: WatchedCheckpoints,
    evaluate: Callable[[Manifest], Mapping[str, float] | None],
    writers: WriterGroup,
    interruption: signals.Interruption,
) -> dict[str, float]:
    """Evaluates until the training has ended.

    Args:
      model_dir: Directory of the training.
      watched: Checkpoints of the training.
      evaluate: Restores and evaluates a checkpoint, and returns the means; None if a signal interrupts it.
      writers: Metric writers.
      interruption: Received signals, which end the evaluation.

    Returns:
      The newest means as "eval_<name>".

    Raises:
      Stopped: After a signal.
      PeerLostError: If the training died or is not complete.
    """
    directory = paths.path(model_dir)
    following = Following(
        watched, Lease(directory / LOCK_NAME), Evaluated(directory / EVALUATED), born=process_start_time()
    )
    newest: dict[str, float] = {}

    def evaluate_next(manifest: Manifest) -> None:
        newest.clear()
        means = evaluate(manifest)
        if means is None:
            raise _stopped(interruption, following)
        newest.update(means)

    end, detail, error_text = RunEnd.FAILED, "", ""
    _log.info("Evaluating each checkpoint in %s after its save.", watched.directory)
    try:
        with interruption:
            detail = following.run(evaluate_next, lambda: interruption.received is not None)
        if interruption.received is not None:
            raise _stopped(interruption, following)
        end = RunEnd.TRAINING_ENDED
    except CtlError as e:
        is_stopped = isinstance(e, Stopped)
        end, detail = (RunEnd.SIGNAL, "") if is_stopped else (RunEnd.FAILED, type(e).__name__)
        error_text = "" if is_stopped else f"{type(e).__name__}: {e}"
        raise
    finally:
        summary = {"evaluations": following.count, "numbers": str(directory / NUMBERS)}
        writers.note(Ended(following.step or 0, end, summary, detail=detail, error=error_text))
    return {f"eval_{name}": value for name, value in newest.items()}


def _stopped(interruption: signals.Interruption, following: Following) -> Stopped:
    number = interruption.received or signal.SIGTERM
    return Stopped(
        f"Stopped by {signals.signal_name(number)} after {following.count} evaluations; the same command "
        "continues from there.",
        signals.exit_code(number),
    )
