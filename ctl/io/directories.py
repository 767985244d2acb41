"""Where the files of a run go: as flags say, else as the platform says.

Vertex AI gives each job AIP_CHECKPOINT_DIR (`gs://bucket/job/checkpoints/`), AIP_TENSORBOARD_LOG_DIR
(`.../logs/`) and AIP_MODEL_DIR (`.../model/`), and mounts every bucket below /gcs. With the parent of
the first as model_dir the three are where a run puts them anyway. No TensorFlow.
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
    """Paths or URLs without a slash at the end; empty where nothing is to be written.

    Attributes:
      model_dir: where the run lives.
      logs: TensorBoard's files, where they are not `model_dir/logs`.
      model: where a copy of the exported SavedModel goes, for the platform to serve.
      sources: the variables that were used.
    """

    model_dir: str = ""
    logs: str = ""
    model: str = ""
    sources: tuple[str, ...] = ()


def read_directories(
    model_dir: str = "", environ: Mapping[str, str] = os.environ, mount: str = MOUNT
) -> Directories:
    """Flags win: a given `model_dir` is kept, whatever AIP_CHECKPOINT_DIR says."""
    given = {name: environ.get(name, "").strip().rstrip("/") for name in (CHECKPOINTS, LOGS, MODEL)}
    sources = [name for name in (LOGS, MODEL) if given[name]]
    if not model_dir and given[CHECKPOINTS]:
        sources.insert(0, CHECKPOINTS)
        parent, _, last = given[CHECKPOINTS].rpartition("/")
        model_dir = parent if last == "checkpoints" else given[CHECKPOINTS]
    model_dir = mounted(model_dir, mount)
    logs = mounted(given[LOGS], mount)
    if logs == f"{model_dir}/logs":
        logs = ""
    return Directories(model_dir, logs, mounted(given[MODEL], mount), tuple(sources))


def mounted(where: str, mount: str = MOUNT) -> str:
    """The same place by the other name: `gs://b/run` <-> `/gcs/b/run`, whichever can be used here.

    A bucket that is mounted is a directory, which more of a run can be written to than to a URL; a path
    below /gcs where nothing is mounted is its URL. Other paths come back as they are.
    """
    bucket = bucket_and_path(where, mount)
    if bucket is None:
        return where
    path = Path(mount) / bucket.partition("/")[0]
    return f"{mount}/{bucket}" if path.is_dir() else _SCHEME + bucket


def bucket_and_path(where: str, mount: str = MOUNT) -> str | None:
    """`gs://b/run` or `/gcs/b/run` -> `b/run`; None for other places."""
    for start in (_SCHEME, f"{mount}/"):
        if where.startswith(start) and where != start:
            return where[len(start) :]
    return None
