"""Output directories of a run, from flags or from environment variables of the platform.

Vertex AI sets AIP_CHECKPOINT_DIR (`gs://bucket/job/checkpoints/`), AIP_TENSORBOARD_LOG_DIR (`.../logs/`)
and AIP_MODEL_DIR (`.../model/`) for each job, and mounts every bucket below /gcs. With the parent of
AIP_CHECKPOINT_DIR as the model_dir, these are the default directories of a run. This module does not import
TensorFlow.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOUNT = "/gcs"  # of Cloud Storage FUSE, on Vertex AI
CHECKPOINTS, LOGS, MODEL = "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR", "AIP_MODEL_DIR"
_SCHEME = "gs://"


@dataclass(frozen=True)
class Directories:
    """Paths or URLs without a trailing slash. An empty string means that the directory is not set.

    Attributes:
      model_dir: Directory of the run.
      logs: Directory of TensorBoard's files, unless it is `model_dir/logs`.
      model: Directory for a copy of the exported SavedModel, which the platform serves.
      sources: Names of the environment variables that were used.
    """

    model_dir: str = ""
    logs: str = ""
    model: str = ""
    sources: tuple[str, ...] = ()


def read_directories(
    model_dir: str = "", environ: Mapping[str, str] = os.environ, mount: str = MOUNT
) -> Directories:
    """Returns the directories of a run.

    Args:
      model_dir: Value of the flag. If it is not empty, AIP_CHECKPOINT_DIR is ignored.
      environ: Environment variables.
      mount: Directory below which buckets are mounted.
    """
    value_by_name = {name: environ.get(name, "").strip().rstrip("/") for name in (CHECKPOINTS, LOGS, MODEL)}
    sources = [name for name in (LOGS, MODEL) if value_by_name[name]]
    if not model_dir and value_by_name[CHECKPOINTS]:
        sources.insert(0, CHECKPOINTS)
        parent, _, last = value_by_name[CHECKPOINTS].rpartition("/")
        model_dir = parent if last == "checkpoints" else value_by_name[CHECKPOINTS]
    model_dir = usable_path(model_dir, mount)
    logs = usable_path(value_by_name[LOGS], mount)
    if logs == f"{model_dir}/logs":
        logs = ""
    return Directories(model_dir, logs, usable_path(value_by_name[MODEL], mount), tuple(sources))


def usable_path(path_or_url: str, mount: str = MOUNT) -> str:
    """Converts between `gs://b/run` and `/gcs/b/run`. Returns other paths unchanged.

    Returns the path if the bucket is mounted, because it supports more operations, otherwise the URL.
    """
    bucket = bucket_and_path(path_or_url, mount)
    if bucket is None:
        return path_or_url
    path = Path(mount) / bucket.partition("/")[0]
    return f"{mount}/{bucket}" if path.is_dir() else _SCHEME + bucket


def bucket_and_path(path_or_url: str, mount: str = MOUNT) -> str | None:
    """Returns `b/run` for `gs://b/run` and `/gcs/b/run`, and None for other paths."""
    for start in (_SCHEME, f"{mount}/"):
        if path_or_url.startswith(start) and path_or_url != start:
            return path_or_url[len(start) :]
    return None
