"""Experiment trackers by name, for the setting `writers`."""

import importlib
import importlib.util
from collections.abc import Sequence

from ctl.errors import UsageError
from ctl.metrics.protocol import MetricWriter

_CLASS_BY_NAME = {  # the name is also the one of the library
    "mlflow": "ctl.trackers.mlflow_writer:MlflowWriter",
    "wandb": "ctl.trackers.wandb_writer:WandbWriter",
}


def check_writer_names(names: Sequence[str], model_dir: str | None) -> None:
    """Raises UsageError for named writers without their library, or without the directory of their files.

    Args:
      names: Names of writers, which are valid.
      model_dir: Directory of the run, or None.
    """
    for name in names:
        if name in _CLASS_BY_NAME and not _is_installed(name):
            raise UsageError(
                f"writers has {name}, and the package {name} is not installed. Run pip install "
                f"'tf-ctl[{name}]', or leave {name} out."
            )
        if name in ("jsonl", "tensorboard") and not model_dir:
            raise UsageError(
                f"writers has {name}, which writes files, and there is no model_dir. Give the model_dir "
                f"(--model_dir), or leave {name} out."
            )


def _is_installed(module: str) -> bool:
    """Returns False also for a directory without code, such as the logs of W&B in `wandb/`."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def create_trackers(names: Sequence[str]) -> list[MetricWriter]:
    """Creates the writers of the trackers among `names`. Raises UsageError like their constructors."""
    writers = []
    for name in names:
        if name in _CLASS_BY_NAME:
            module, _, class_name = _CLASS_BY_NAME[name].partition(":")
            writers.append(getattr(importlib.import_module(module), class_name)())
    return writers
