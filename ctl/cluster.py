"""Who am I: TF_CONFIG, checked and normalised before TensorFlow reads it.

TensorFlow's own answers to a bad TF_CONFIG are a raw JSON error at best and an endless wait at
worst. Here every mistake is one sentence. Pure data; importing this never imports TensorFlow.
"""

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ctl.errors import UsageError

_TRAINING_TYPES = ("chief", "worker")
_KNOWN_TYPES = (*_TRAINING_TYPES, "ps", "evaluator")
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True)
class Cluster:
    """The processes of one job and this process's place among them.

    Attributes:
      tasks: task type -> addresses "host:port"; empty for a job of one process.
      task_type: "chief", "worker", "ps" or "evaluator".
      task_index: this task's index within its type.
      has_evaluator: another process, listed in TF_CONFIG, evaluates the checkpoints.
    """

    tasks: Mapping[str, tuple[str, ...]]
    task_type: str = "worker"
    task_index: int = 0
    has_evaluator: bool = False

    @property
    def num_workers(self) -> int:
        """Processes that train: chief and workers; at least 1."""
        return max(1, sum(len(self.tasks.get(t, ())) for t in _TRAINING_TYPES))

    @property
    def worker_index(self) -> int:
        """This process's rank among those that train: the chief first, then workers in order."""
        return self.task_index + (
            len(self.tasks.get("chief", ())) if self.task_type == "worker" else 0
        )

    @property
    def is_chief(self) -> bool:
        """True for the one process that writes shared files."""
        return self.task_type in _TRAINING_TYPES and self.worker_index == 0

    @property
    def address(self) -> str | None:
        """This task's own "host:port", or None in a job of one process."""
        addresses = self.tasks.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    def tf_config(self) -> str:
        """The TF_CONFIG that says the same to TensorFlow."""
        return json.dumps(
            {
                "cluster": {k: list(v) for k, v in self.tasks.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )


def read(environ: Mapping[str, str] = os.environ, *, parameter_servers: bool = False) -> Cluster:
    """Reads TF_CONFIG; without one (or with an empty one) the cluster is this process alone.

    A `ps` entry is dropped unless this task is one: synchronous training would wait for it for ever.
    With `parameter_servers` it stays.
    Raises UsageError that names the mistake.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return Cluster({})
    try:
        config = json.loads(text)
    except json.JSONDecodeError as e:
        raise UsageError(
            f"TF_CONFIG is not JSON ({e}). It came as {text[:80]!r}; expected e.g. {_EXAMPLE}."
        ) from None
    if not isinstance(config, dict):
        raise UsageError(f"TF_CONFIG is {text[:80]!r}; expected an object such as {_EXAMPLE}.")
    cluster = config.get("cluster") or {}
    task = config.get("task")
    if not cluster and not (isinstance(task, dict) and task.get("type") == "evaluator"):
        return Cluster({})
    tasks = _read_tasks(cluster)
    task_type, index = _read_task(task, tasks)
    has_evaluator = "evaluator" in tasks
    if task_type in _TRAINING_TYPES and not parameter_servers:
        tasks = {k: v for k, v in tasks.items() if k in _TRAINING_TYPES}
    return Cluster(tasks, task_type, index, has_evaluator)


def normalise(cluster: Cluster, environ: MutableMapping[str, str] = os.environ) -> None:
    """Writes the cluster back as the TF_CONFIG that TensorFlow will read."""
    if cluster.tasks:
        environ["TF_CONFIG"] = cluster.tf_config()


def _read_tasks(cluster) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, dict):
        raise UsageError(
            f"TF_CONFIG's cluster is {cluster!r}; expected lists of addresses by task type, "
            f"e.g. {_EXAMPLE}."
        )
    tasks: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for key, addresses in cluster.items():
        kind = "chief" if key == "master" else key
        if kind not in _KNOWN_TYPES:
            raise UsageError(
                f"TF_CONFIG's cluster has the task type {key!r}; expected one of "
                f"{', '.join(_KNOWN_TYPES)}."
            )
        if not isinstance(addresses, list) or not addresses:
            raise UsageError(
                f"TF_CONFIG's cluster has {addresses!r} for {key!r}; expected a list of "
                '"host:port" strings.'
            )
        for i, address in enumerate(addresses):
            _check_address(address, f"{key}[{i}]")
            if address in seen:
                raise UsageError(
                    f"TF_CONFIG gives {address} to both {seen[address]} and {key}[{i}]; "
                    "every task needs an address of its own."
                )
            seen[address] = f"{key}[{i}]"
        if kind in tasks:
            raise UsageError(
                "TF_CONFIG's cluster has both 'master' and 'chief'; write 'chief' only."
            )
        tasks[kind] = tuple(addresses)
    if len(tasks.get("chief", ())) > 1:
        raise UsageError(
            f"TF_CONFIG's cluster has {len(tasks['chief'])} chiefs; expected one, the others are "
            "workers."
        )
    return tasks


def _check_address(address, where: str) -> None:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f'TF_CONFIG\'s cluster has {address!r} for {where}; expected "host:port" with a port '
            'from 1 to 65535, e.g. "10.0.0.2:2222".'
        )


def _read_task(task, tasks) -> tuple[str, int]:
    example = '"task": {"type": "worker", "index": 0}'
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise UsageError(
            f"TF_CONFIG has a cluster and the task {task!r}; expected type and index, e.g. {example}."
        )
    kind = "chief" if task["type"] == "master" else task["type"]
    if kind not in _KNOWN_TYPES:
        raise UsageError(
            f"TF_CONFIG's task type is {task['type']!r}; expected one of {', '.join(_KNOWN_TYPES)}."
        )
    try:
        index = int(task["index"])
        if isinstance(task["index"], (bool, float)) or index < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(
            f"TF_CONFIG's task index is {task['index']!r}; expected a whole number >= 0."
        ) from None
    if kind == "evaluator" and kind not in tasks:
        return kind, index
    count = len(tasks.get(kind, ()))
    if index >= count:
        raise UsageError(
            f"TF_CONFIG's task is {kind} {index}, but its cluster lists {count} of type {kind!r} "
            f"(index 0 to {count - 1})."
            if count
            else f"TF_CONFIG's task is {kind} {index}, but its cluster lists no {kind!r}."
        )
    return kind, index
