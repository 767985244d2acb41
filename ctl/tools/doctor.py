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
_OLDEST_TENSORFLOW = (2, 16)
_MOST_NAMES = 8


def main(argv: Sequence[str]) -> int:
    """Prints the diagnosis. Returns 0, or 2 if it has problems."""
    parser = argparse.ArgumentParser(
        prog="ctl doctor",
        description="Print what this process understands of its cluster, and what is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--no_network", action="store_true", help="resolve no names, try no ports")
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
            me = detection.read_topology(environ).without_servers()
            diagnosis["notes"] = [*diagnosis["notes"], *_nameless(me)]
            own_port.check_port_is_free(me)
    except UsageError as e:
        problems.append(str(e))
    where = directories.read_directories("", environ)
    problems += _unwritable(where.model_dir) + _unwritable(where.model)
    diagnosis["directories"] = {
        "model_dir": where.model_dir,
        "logs": where.logs or _inside(where.model_dir, "logs"),
        "model": where.model,
        "sources": list(where.sources),
    }
    if paths.is_url(where.model_dir):
        note = "metrics.jsonl is not written to a URL; mount the bucket, or give --model_dir a path."
        diagnosis["notes"] = [*diagnosis["notes"], note]
    diagnosis["versions"], old = _versions()
    diagnosis["gpus"] = len(glob.glob("/dev/nvidia[0-9]*"))
    diagnosis["problems"] = problems + old
    return diagnosis


def _read_cluster(environ: Mapping[str, str]) -> dict[str, Any]:
    topology = detection.read_topology(environ)
    me = topology.without_servers()
    trains = me.task_type in TRAINING_TYPES
    return {
        "platform": me.platform or "none: no variable tells of a cluster",
        "sources": list(me.sources),
        "also_set": detection.also_set(environ, me),
        "task": {
            "type": me.task_type,
            "index": me.task_index,
            "address": me.address,
            "rank": me.worker_index if trains else None,
            "is_chief": me.is_chief,
        },
        "cluster": {task_type: list(addresses) for task_type, addresses in topology.tasks.items()},
        "num_workers": me.num_workers,
        "has_evaluator": me.has_evaluator,
        "tf_config": json.loads(me.tf_config()) if me.tasks else None,
        "settings": dict(me.settings),
        "notes": list(me.notes),
    }


def _nameless(me: Topology) -> list[str]:
    """Returns notes about hosts without an address. They may get one later, so these are no problems."""
    notes = []
    hosts = {a.rpartition(":")[0] for addresses in me.tasks.values() for a in addresses}
    for host in sorted(hosts):
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as e:
            notes.append(
                f"the host {host!r} has no address here yet ({e.strerror or e}). If it stays so: are all "
                "parts of the job up, and is the name right?"
            )
    return notes


def _unwritable(directory: str) -> list[str]:
    """Returns a problem if the directory cannot be created or written."""
    if not directory or paths.is_url(directory):
        return []
    there = Path(directory).absolute()
    while not there.exists():
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK):
        return []
    return [f"nothing can be written to {directory}: {there} is no directory that this user may write to."]


def _versions() -> tuple[dict[str, str | None], list[str]]:
    versions: dict[str, str | None] = {"ctl": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    problems = []
    came = versions["tensorflow"]
    if came is None and not any(map(_version, ("tensorflow-cpu", "tf-nightly"))):
        problems.append("TensorFlow is not installed; expected 2.16 or newer: pip install tensorflow.")
    elif came and tuple(int(p) for p in came.split(".")[:2]) < _OLDEST_TENSORFLOW:
        problems.append(f"TensorFlow is {came}; expected 2.16 or newer.")
    return versions, problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _inside(directory: str, name: str) -> str:
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
    where = diagnosis["directories"]
    rows += [(name, where[name]) for name in ("model_dir", "logs", "model") if where[name]]
    if where["sources"]:
        rows.append(("by", ", ".join(where["sources"])))
    rows.append(("versions", ", ".join(f"{k} {v or 'missing'}" for k, v in diagnosis["versions"].items())))
    rows.append(("GPUs", str(diagnosis["gpus"])))
    lines = [f"{name:<10} {value}" for name, value in rows]
    lines += [f"note: {note}" for note in diagnosis["notes"]]
    lines += [f"wrong: {problem}" for problem in diagnosis["problems"]]
    return "\n".join([*lines, "" if diagnosis["problems"] else "Nothing is wrong."]).rstrip()


def _rows_of_task(diagnosis: Mapping[str, Any]) -> list[tuple[str, str]]:
    task = diagnosis["task"]
    if not diagnosis["cluster"] and task["type"] != "evaluator":
        rows = [("this task", "a process of its own: one worker, the chief")]
    else:
        of = f", rank {task['rank']} of {diagnosis['num_workers']}" if task["rank"] is not None else ""
        chief = ", the chief" if task["is_chief"] else ""
        rows = [("this task", f"{task['type']} {task['index']}{of}{chief}")]
    if task["address"]:
        rows.append(("address", task["address"]))
    for task_type, addresses in diagnosis["cluster"].items():
        suffix = f" and {len(addresses) - _MOST_NAMES} more" if len(addresses) > _MOST_NAMES else ""
        rows.append(
            (f"{task_type}s" if task_type != "ps" else "ps", ", ".join(addresses[:_MOST_NAMES]) + suffix)
        )
    if diagnosis["has_evaluator"] and task["type"] != "evaluator":
        rows.append(("evaluator", "another process evaluates the checkpoints"))
    rows += [(name, f"{value} (set for TensorFlow)") for name, value in diagnosis["settings"].items()]
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
