"""Metric writers of a process: those of the user, named ones, or the default ones."""

import logging
from collections.abc import Callable, Sequence

from ctl.io import paths
from ctl.metrics.adapter import MetricWriterLike, as_writers
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import MetricWriter
from ctl.trackers.registry import create_trackers
from ctl.training.run_options import RunOptions

METRICS_FILE = "metrics.jsonl"
_DEFAULT_NAMES = ("console", "jsonl", "tensorboard")
_log = logging.getLogger("ctl")


def default_writers(
    model_dir: str | None,
    logs_dir: str,
    *,
    metrics_file: str = METRICS_FILE,
    console: bool = True,
    files: Sequence[str] = _DEFAULT_NAMES,
) -> list[MetricWriter]:
    """Creates the writers of a process for which the user passed no writers.

    Args:
      model_dir: Directory of `metrics_file`. If it is None, no writer of files is created. If it is a URL,
        `metrics_file` is not written, and a warning is logged.
      logs_dir: Directory of TensorBoard's event files.
      metrics_file: File name of the JSON lines.
      console: True creates a `ConsoleWriter`.
      files: Names of the writers of files to create, of "jsonl" and "tensorboard".
    """
    # Imported here, as `rich` and `tensorboard` take time and most callers of ctl pass their own writers.
    from ctl.metrics.console import ConsoleWriter
    from ctl.metrics.jsonl import JsonlWriter
    from ctl.metrics.tensorboard import TensorBoardWriter

    writers: list[MetricWriter] = [ConsoleWriter()] if console else []
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


def created_writers(
    model_dir: str | None, options: RunOptions, *, metrics_file: str = METRICS_FILE
) -> list[MetricWriterLike]:
    """Returns the user's writers, and creates the named or the default ones.

    Args:
      model_dir: Directory of the run, or None.
      options: Options of the run.
      metrics_file: File name of the JSON lines.
    """
    requested = _DEFAULT_NAMES if options.writers is None else options.writers
    names = list(dict.fromkeys(writer for writer in requested if isinstance(writer, str)))
    writers: list[MetricWriterLike] = [writer for writer in requested if not isinstance(writer, str)]
    if not names:
        return writers
    files = [name for name in names if name in _DEFAULT_NAMES]
    writers += default_writers(
        model_dir, options.log_dir, metrics_file=metrics_file, console="console" in names, files=files
    )
    return [*writers, *create_trackers(names)]


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
