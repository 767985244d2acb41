"""A short run of the whole program in a temporary directory: `--fast_dev_run`."""

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ctl.config import Config
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

NUM_STEPS = 2
_NUM_EVAL_BATCHES = 2
_REMOVED = ("epochs", "report_hypertune", "eval_every_steps", "save_every_steps", "max_secs")
_MODES = ("train_and_eval", "train")


@contextlib.contextmanager
def temporary_run(explicit: Config, topology: Topology) -> Iterator[Config]:
    """Yields the explicit settings of a short run, and removes its directory at the end.

    Args:
      explicit: Explicit settings of the user.
      topology: Topology of the job. Its workers use one directory. An evaluator exits with 0.

    Raises:
      UsageError: If --mode does not train.
    """
    if explicit.mode not in _MODES:
        raise UsageError(
            f"got --fast_dev_run and --mode={explicit.mode}; --fast_dev_run trains and evaluates. Leave "
            "one of them out."
        )
    if topology.evaluates:
        print("--fast_dev_run: the chief evaluates, so this evaluator ends.", file=sys.stderr, flush=True)
        sys.exit(0)
    settings = {k: v for k, v in explicit.explicit_settings().items() if k not in _REMOVED}
    directory = _directory(topology)
    settings |= {"fast_dev_run": True, "model_dir": str(directory / "run"), "train_steps": NUM_STEPS}
    settings |= {"log_every_steps": 1, "steps_per_loop": 1}
    settings |= {"eval_every_steps": NUM_STEPS} if topology.has_evaluator else {}
    settings.setdefault("max_eval_batches", _NUM_EVAL_BATCHES)
    try:
        yield Config(**settings)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def describe_success(result: Mapping[str, object], formats: Sequence[str]) -> str:
    """Returns the message at the end of the run.

    Args:
      result: Result of `Trainer.train`.
      formats: Formats of the export.
    """
    has_evaluated = any(name.startswith("eval_") for name in result)
    actions = [
        f"trained {NUM_STEPS} steps",
        *(["evaluated"] if has_evaluated else []),
        "saved a checkpoint",
    ]
    actions += [f"exported {', '.join(formats)}"] if formats else []
    return f"--fast_dev_run: {', '.join(actions)}; all files are removed."


def _directory(topology: Topology) -> Path:
    """Returns a directory that is new, and equal on all workers of this machine."""
    if topology.num_workers == 1:
        return Path(tempfile.mkdtemp(prefix="ctl-fast-dev-run-"))
    job = json.dumps({task_type: list(addresses) for task_type, addresses in topology.tasks.items()})
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"ctl-fast-dev-run-{digest}"
    if topology.is_chief:  # of a job with the same addresses that was killed
        shutil.rmtree(directory, ignore_errors=True)
    return directory
