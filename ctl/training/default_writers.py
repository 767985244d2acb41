"""Metric writers of a process: those of the user, named ones, or the default ones."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence

from ctl.errors import UsageError
from ctl.io import paths
from ctl.metrics.adapter import MetricWriterLike, as_writers
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import MetricWriter
from ctl.training.run_options import RunOptions

METRICS_FILE = "metrics.jsonl"
_DEFAULT_NAMES = ("console", "jsonl", "tensorboard")
_TRACKERS = {  # name -> module and class of the writer, and the required library
    "mlflow": ("ctl.metrics.mlflow_writer", "MlflowWriter", "mlflow"),
    "wandb": ("ctl.metrics.wandb_writer", "WandbWriter", "wandb"),
}
_log = logging.getLogger("ctl")


def default_writers(
    model_dir: str | None,
    logs_dir: str,
    *,
    metrics_file: str = METRICS_FILE,
    console: bool = True,
    live: bool | None = None,
    files: Sequence[str] = _DEFAULT_NAMES,
) -> list[MetricWriter]:
    """Creates the writers of a process for which the user passed no writers.

    Args:
      model_dir: Directory of `metrics_file`. If it is None, no writer of files is created. If it is a URL,
        `metrics_file` is not written, and a warning is logged.
      logs_dir: Directory of TensorBoard's event files.
      metrics_file: File name of the JSON lines.
      console: True creates a `ConsoleWriter`.
      live: Argument of the `ConsoleWriter`: progress bar, lines, or None to choose by the terminal.
      files: Names of the writers of files to create, of "jsonl" and "tensorboard".
    """
    # Imported here, as `rich` and `tensorboard` take time and most callers of ctl pass their own writers.
    from ctl.metrics.console import ConsoleWriter
    from ctl.metrics.jsonl import JsonlWriter
    from ctl.metrics.tensorboard import TensorBoardWriter

    writers: list[MetricWriter] = [ConsoleWriter(live=live)] if console else []
    if "jsonl" in files and paths.is_url(model_dir):
        _log.warning(
            "model_dir is a URL: %s is not written, as it needs a local path. "
            "Mount it (/gcs/...), or give writers=[...] other paths.",
            metrics_file,
        )
    elif "jsonl" in files and model_dir:
        writers.append(JsonlWriter(f"{model_dir}/{metrics_file}"))
    if model_dir and "tensorboard" in files:
        writers.append(TensorBoardWriter(logs_dir))
    return writers


def check_names(names: Sequence[str], model_dir: str | None) -> None:
    """Raises UsageError for named writers without their library, or without the directory of their files.

    Args:
      names: Names of writers, which are valid.
      model_dir: Directory of the run, or None.
    """
    for name in names:
        if name in _TRACKERS and not _is_installed(_TRACKERS[name][2]):
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


def created_writers(
    model_dir: str | None, options: RunOptions, *, metrics_file: str = METRICS_FILE
) -> list[MetricWriterLike]:
    """Returns the user's writers, and creates the named or the default ones.

    Args:
      model_dir: Directory of the run, or None.
      options: Options of the run.
      metrics_file: File name of the JSON lines.
    """
    given: Sequence[MetricWriterLike | str] = _DEFAULT_NAMES if options.writers is None else options.writers
    names = [writer for writer in given if isinstance(writer, str)]
    writers: list[MetricWriterLike] = [writer for writer in given if not isinstance(writer, str)]
    if not names:
        return writers
    files = [name for name in names if name in _DEFAULT_NAMES]
    writers += default_writers(
        model_dir, options.log_dir, metrics_file=metrics_file, console="console" in names, files=files
    )
    for name in names:
        if name in _TRACKERS:
            module, class_name, _ = _TRACKERS[name]
            writers.append(getattr(importlib.import_module(module), class_name)())
    return writers


def writers_of_run(
    model_dir: str, options: RunOptions, *, is_chief: bool, check_lease: Callable[[], None] = lambda: None
) -> WriterGroup:
    """Returns the writers that a run calls in this process.

    On the chief these are the user's or the default ones, and the extra ones. On other workers these are
    the user's writers with `everywhere = True`.

    Args:
      model_dir: Directory of the run, or an empty string.
      options: Options of the run.
      is_chief: True in the process that writes shared files.
      check_lease: Raises LeaseLostError if another job has taken over model_dir.
    """
    if not is_chief:
        user_writers = [
            w for w in (*(options.writers or ()), *options.extra_writers) if not isinstance(w, str)
        ]
        return WriterGroup(writer for writer in as_writers(user_writers) if writer.everywhere)
    writers = created_writers(model_dir or None, options)
    return WriterGroup([*writers, *options.extra_writers], check_lease)
