"""A short run of the whole program in a temporary directory: `--fast_dev_run`."""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ctl.config import Config
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

_NUM_STEPS = 2
_NUM_EVAL_BATCHES = 2
_MODES = ("train_and_eval", "train")
_TRACKERS = ("mlflow", "wandb")
_PREFIX = "ctl-fast-dev-run"


@contextlib.contextmanager
def temporary_run(explicit: Config, mode: str, topology: Topology) -> Iterator[Config]:
    """Yields the explicit settings of a short run, and removes its directory at the end.

    Args:
      explicit: Explicit settings of the user.
      mode: Task of the program.
      topology: Topology of the job. Its workers use one directory. An evaluator exits with 0.

    Raises:
      UsageError: If `mode` does not train.
    """
    if mode not in _MODES:
        raise UsageError(
            f"got --fast_dev_run and --mode={mode}; --fast_dev_run trains and evaluates. Leave one "
            "of them out."
        )
    if topology.evaluates:
        print("--fast_dev_run: the chief evaluates, so this evaluator ends.", file=sys.stderr, flush=True)
        sys.exit(0)
    directory = _new_directory(topology)
    replaced = {
        "fast_dev_run": False,  # the trainer has the settings of a normal run
        "model_dir": str(directory / "run"),
        "train_steps": _NUM_STEPS,
        "epochs": 0.0,
        "max_secs": 0.0,
        "report_hypertune": "",
        "save_every_steps": 0,
        "log_every_steps": 1,
        "steps_per_loop": 1,
    }
    settings = {"max_eval_batches": _NUM_EVAL_BATCHES, **explicit.explicit_settings(), **replaced}
    if "writers" in settings:  # a check of the program is no run for experiment trackers
        settings["writers"] = [name for name in settings["writers"] if name not in _TRACKERS] or ["console"]
    settings.pop("eval_every_steps", None)  # the default is the end, without an evaluator
    if topology.has_evaluator:
        settings["eval_every_steps"] = _NUM_STEPS
    if not topology.is_chief:  # which removes the directory
        yield Config(**settings)
        return
    remove = functools.partial(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(remove)  # after a signal
    try:
        yield Config(**settings)
    finally:
        remove()
        atexit.unregister(remove)


def describe_success(step: int, result: Mapping[str, object], formats: Sequence[str]) -> str:
    """Returns the message at the end of the run.

    Args:
      step: Number of completed steps.
      result: Result of `Trainer.train`.
      formats: Formats of the export.
    """
    has_evaluated = any(name.startswith("eval_") for name in result)
    actions = [f"trained {step} steps", *(["evaluated"] if has_evaluated else []), "saved a checkpoint"]
    actions += [f"exported {', '.join(formats)}"] if formats else []
    return f"--fast_dev_run: {', '.join(actions)}. The temporary directory is removed."


def is_temporary(model_dir: str) -> bool:
    """Returns True for the directory of a run with `--fast_dev_run`."""
    return Path(model_dir).parent.name.startswith(f"{_PREFIX}-")


def _new_directory(topology: Topology) -> Path:
    """Returns a directory that is new, and equal on all workers of this machine."""
    if topology.num_workers == 1:
        return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-"))
    job = json.dumps({task_type: list(addresses) for task_type, addresses in topology.tasks.items()})
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"{_PREFIX}-{os.getuid()}-{digest}"
    if topology.is_chief:  # of a job with the same addresses that was killed
        shutil.rmtree(directory, ignore_errors=True)
    return directory
