"""The `ctl doctor` command: task, cluster, directories and versions of this process, and their problems.

The command starts no process, writes no file and does not import TensorFlow. Run it first in a container
of a job that does not start.
"""

import argparse
import glob
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl.distribute import own_port
from ctl.distribute.platforms import detection
from ctl.distribute.topology import TRAINING_TYPES, Topology
from ctl.errors import EXIT_DONE, EXIT_USAGE, UsageError
from ctl.io import directories, paths
from ctl.io.console import ignore_closed_stdout
from ctl.version import __version__

_PACKAGES = ("tensorflow", "keras", "numpy", "tensorboard", "protobuf")
_MIN_TENSORFLOW = (2, 16)
_MAX_NAMES = 8


def main(argv: Sequence[str]) -> int:
    """Prints the diagnosis. Returns 0, or 2 if it has problems."""
    parser = argparse.ArgumentParser(
        prog="ctl doctor",
        description="Prints the cluster configuration that this process detects, and its problems.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--no_network", action="store_true", help="do not resolve host names or check the port"
    )
    options = parser.parse_args(list(argv))
    diagnosis = diagnose(os.environ, network=not options.no_network)
    with ignore_closed_stdout():
        print(json.dumps(diagnosis, indent=1) if options.json else diagnosis_text(diagnosis))
    return EXIT_USAGE if diagnosis["problems"] else EXIT_DONE


def diagnose(environ: Mapping[str, str], *, network: bool = True) -> dict[str, Any]:
    """Returns the diagnosis as a JSON object. `network` resolves the peers and checks the port."""
    problems: list[str] = []
    diagnosis: dict[str, Any] = {
        "platform": "",
        "sources": [],
        "also_set": [],
        "task": None,
        "cluster": {},
        "notes": [],
        "tf_config": None,
    }
    try:
        diagnosis |= _read_cluster(environ)
        if network:
            topology = detection.read_topology(environ).without_servers()
            diagnosis["notes"] = [*diagnosis["notes"], *_find_unresolved_hosts(topology)]
            own_port.check_port_is_free(topology)
    except UsageError as e:
        problems.append(str(e))
    configured = directories.read_directories("", environ)
    problems += _check_writable(configured.model_dir) + _check_writable(configured.model)
    diagnosis["directories"] = {
        "model_dir": configured.model_dir,
        "logs": configured.logs or _join_path(configured.model_dir, "logs"),
        "model": configured.model,
        "sources": list(configured.sources),
    }
    if paths.is_url(configured.model_dir):
        note = "metrics.jsonl is not written to a URL; mount the bucket, or set --model_dir to a path."
        diagnosis["notes"] = [*diagnosis["notes"], note]
    diagnosis["versions"], version_problems = _read_versions()
    diagnosis["gpus"] = len(glob.glob("/dev/nvidia[0-9]*"))
    diagnosis["problems"] = problems + version_problems
    return diagnosis


def _read_cluster(environ: Mapping[str, str]) -> dict[str, Any]:
    topology = detection.read_topology(environ)
    task = topology.without_servers()
    trains = task.task_type in TRAINING_TYPES
    return {
        "platform": task.platform or "none: no environment variable defines a cluster",
        "sources": list(task.sources),
        "also_set": detection.also_set(environ, task),
        "task": {
            "type": task.task_type,
            "index": task.task_index,
            "address": task.address,
            "rank": task.worker_index if trains else None,
            "is_chief": task.is_chief,
        },
        "cluster": {task_type: list(addresses) for task_type, addresses in topology.tasks.items()},
        "num_workers": task.num_workers,
        "has_evaluator": task.has_evaluator,
        "tf_config": json.loads(task.tf_config()) if task.tasks else None,
        "settings": dict(task.settings),
        "notes": list(task.notes),
    }


def _find_unresolved_hosts(topology: Topology) -> list[str]:
    """Returns notes about unresolved host names, which may be resolved later and so are no problems."""
    notes = []
    hosts = {a.rpartition(":")[0] for addresses in topology.tasks.values() for a in addresses}
    for host in sorted(hosts):
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as e:
            notes.append(
                f"the host name {host!r} cannot be resolved yet ({e.strerror or e}). If this persists, "
                "check that all processes of the job have started and that the name is correct."
            )
    return notes


def _check_writable(directory: str) -> list[str]:
    """Returns a problem if the directory cannot be created or written."""
    if not directory or paths.is_url(directory):
        return []
    ancestor = Path(directory).absolute()
    while not ancestor.exists():
        ancestor = ancestor.parent
    if ancestor.is_dir() and os.access(ancestor, os.W_OK):
        return []
    return [f"{directory} is not writable: {ancestor} is not a directory in which this user may write."]


def _read_versions() -> tuple[dict[str, str | None], list[str]]:
    versions: dict[str, str | None] = {"ctl": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    problems = []
    tensorflow_version = versions["tensorflow"]
    if tensorflow_version is None and not any(map(_version, ("tensorflow-cpu", "tf-nightly"))):
        problems.append(
            "TensorFlow is not installed; expected 2.16 or newer. Run `pip install tensorflow`."
        )
    elif tensorflow_version and tuple(int(p) for p in tensorflow_version.split(".")[:2]) < _MIN_TENSORFLOW:
        problems.append(f"TensorFlow is {tensorflow_version}; expected 2.16 or newer.")
    return versions, problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _join_path(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else ""


def diagnosis_text(diagnosis: Mapping[str, Any]) -> str:
    """Returns the diagnosis as lines of text."""
    rows = [("platform", diagnosis["platform"])]
    if diagnosis["sources"]:
        rows.append(("read from", ", ".join(diagnosis["sources"])))
    if diagnosis["also_set"]:
        rows.append(("also set", ", ".join(diagnosis["also_set"]) + " (not used)"))
    if diagnosis["task"]:
        rows += _rows_of_task(diagnosis)
    configured = diagnosis["directories"]
    rows += [(name, configured[name]) for name in ("model_dir", "logs", "model") if configured[name]]
    if configured["sources"]:
        rows.append(("by", ", ".join(configured["sources"])))
    rows.append(("versions", ", ".join(f"{k} {v or 'missing'}" for k, v in diagnosis["versions"].items())))
    rows.append(("GPUs", str(diagnosis["gpus"])))
    lines = [f"{name:<10} {value}" for name, value in rows]
    lines += [f"note: {note}" for note in diagnosis["notes"]]
    lines += [f"problem: {problem}" for problem in diagnosis["problems"]]
    return "\n".join([*lines, "" if diagnosis["problems"] else "No problems found."]).rstrip()


def _rows_of_task(diagnosis: Mapping[str, Any]) -> list[tuple[str, str]]:
    task = diagnosis["task"]
    if not diagnosis["cluster"] and task["type"] != "evaluator":
        rows = [("this task", "a single process: one worker, which is the chief")]
    else:
        rank_text = (
            f", rank {task['rank']} of {diagnosis['num_workers']}" if task["rank"] is not None else ""
        )
        chief = ", the chief" if task["is_chief"] else ""
        rows = [("this task", f"{task['type']} {task['index']}{rank_text}{chief}")]
    if task["address"]:
        rows.append(("address", task["address"]))
    for task_type, addresses in diagnosis["cluster"].items():
        suffix = f" and {len(addresses) - _MAX_NAMES} more" if len(addresses) > _MAX_NAMES else ""
        rows.append(
            (f"{task_type}s" if task_type != "ps" else "ps", ", ".join(addresses[:_MAX_NAMES]) + suffix)
        )
    if diagnosis["has_evaluator"] and task["type"] != "evaluator":
        rows.append(("evaluator", "another process evaluates the checkpoints"))
    rows += [(name, f"{value} (set for TensorFlow)") for name, value in diagnosis["settings"].items()]
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
