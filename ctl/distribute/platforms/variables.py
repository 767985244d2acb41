"""Environment variables of all platforms: parsing and validation."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ctl.distribute.topology import TRAINING_TYPES, Topology
from ctl.errors import UsageError

KNOWN_TYPES = (*TRAINING_TYPES, "ps", "evaluator")
TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_MOST_DIGITS = 18
PORT_VARIABLE = "CTL_PORT"  # for platforms that name hosts only


def checked_tasks(cluster: Any, variable: str) -> dict[str, tuple[str, ...]]:
    """Returns lists of "host:port" by task type, with `master` renamed to chief. Raises UsageError."""
    if not isinstance(cluster, dict):
        raise UsageError(
            f"{variable}'s cluster is {cluster!r}; expected lists of addresses by task type, "
            f"e.g. {TF_CONFIG_EXAMPLE}."
        )
    tasks: dict[str, tuple[str, ...]] = {}
    task_by_address: dict[str, str] = {}
    for key, addresses in cluster.items():
        task_type = "chief" if key == "master" else key
        if task_type not in KNOWN_TYPES:
            raise UsageError(
                f"{variable}'s cluster has the task type {key!r}; expected one of {', '.join(KNOWN_TYPES)}."
            )
        if not isinstance(addresses, list) or not addresses:
            raise UsageError(
                f"{variable}'s cluster has {addresses!r} for {key!r}; expected a list of "
                '"host:port" strings.'
            )
        for i, address in enumerate(addresses):
            check_address(address, f"{variable}'s cluster", f"{key}[{i}]")
            if address in task_by_address:
                raise UsageError(
                    f"{variable} gives {address} to both {task_by_address[address]} and {key}[{i}]; "
                    "each task needs its own address."
                )
            task_by_address[address] = f"{key}[{i}]"
        if task_type in tasks:
            raise UsageError(f"{variable}'s cluster has both 'master' and 'chief'; write 'chief' only.")
        tasks[task_type] = tuple(addresses)
    if len(tasks.get("chief", ())) > 1:
        raise UsageError(
            f"{variable}'s cluster has {len(tasks['chief'])} chiefs; expected one. List the other tasks as "
            "workers."
        )
    return tasks


def check_address(address: Any, variable: str, where: str) -> None:
    """Raises UsageError for a value that is not "host:port"."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise UsageError(
            f'{variable} has {address!r:.100} for {where}; expected "host:port" with a port '
            'from 1 to 65535, e.g. "10.0.0.2:2222".'
        )


def checked_task(task: Any, tasks: Mapping[str, Sequence[str]], variable: str) -> tuple[str, int]:
    """Returns type and index of a task in `tasks`, or of an evaluator. Raises UsageError."""
    example = '"task": {"type": "worker", "index": 0}'
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise UsageError(
            f"{variable} has a cluster and the task {task!r}; expected type and index, e.g. {example}."
        )
    task_type = "chief" if task["type"] == "master" else task["type"]
    if task_type not in KNOWN_TYPES:
        raise UsageError(
            f"{variable}'s task type is {task['type']!r}; expected one of {', '.join(KNOWN_TYPES)}."
        )
    try:
        index = int(task["index"])
        if isinstance(task["index"], (bool, float)) or index < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{variable}'s task index is {task['index']!r}; expected a whole number >= 0."
        ) from None
    if task_type == "evaluator" and task_type not in tasks:
        return task_type, index
    count = len(tasks.get(task_type, ()))
    if index >= count:
        raise UsageError(
            f"{variable}'s task is {task_type} {index}, but its cluster lists {count} of this type "
            f"(index 0 to {count - 1})."
            if count
            else f"{variable}'s task is {task_type} {index}, but its cluster lists no {task_type!r}."
        )
    return task_type, index


def parsed(environ: Mapping[str, str], name: str, example: str) -> dict[str, Any] | None:
    """Returns the JSON object in a variable, or None if it is not set or empty. Raises UsageError."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        mapping = json_of(text)
    except ValueError as e:
        raise UsageError(
            f"{name} is not JSON ({e}). Received {text[:80]!r}; expected e.g. {example}."
        ) from None
    if not isinstance(mapping, dict):
        raise UsageError(f"{name} is {text[:80]!r}; expected an object such as {example}.")
    return mapping


def check_keys(value: Mapping[str, Any], known_keys: Collection[str], variable: str) -> None:
    """Raises UsageError for a key of `value` that is not in `known_keys`; names the nearest known key."""
    for key in value:
        if key not in known_keys:
            suggestion = nearest(key, known_keys)
            hint = f"Did you mean {suggestion!r}? " if suggestion else ""
            raise UsageError(
                f"{variable} has the unknown key {key!r:.100}; expected only {', '.join(known_keys)}. "
                f"{hint}Without a cluster this process would train alone."
            )


def nearest(name: str, known_names: Collection[str]) -> str | None:
    """Returns the name in `known_names` that is spelt most like `name`, or None if none is similar."""
    folded = {n.lower(): n for n in known_names}
    matches = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.75)
    return folded[matches[0]] if matches else None


def json_of(text: str) -> Any:
    """Parses JSON. Raises ValueError, also for text that is nested too deeply or has too many digits."""
    try:
        value = json.loads(text)
        repr(value)  # the value is part of messages
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the integer >= 0 in a variable, or None if it is not set. Raises UsageError."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise UsageError(f"{name} is {text[:80]!r}; expected a whole number.")
    return int(text)


def port(environ: Mapping[str, str], default: int) -> int:
    """Returns CTL_PORT, the first port of this job on each host, or the platform's default."""
    first_port = number(environ, PORT_VARIABLE)
    if first_port is None:
        return default
    if not 0 < first_port < 65536:
        raise UsageError(f"{PORT_VARIABLE} is {first_port}; expected a port from 1 to 65535.")
    return first_port


def workers(
    platform: str, sources: Sequence[str], addresses: Sequence[str], index: int, **options: Any
) -> Topology:
    """Returns the topology of equal workers, or of one process for a single address. Raises UsageError."""
    for i, address in enumerate(addresses):
        check_address(address, sources[0], f"task {i}")
    doubled = sorted({a for a in addresses if addresses.count(a) > 1})
    if doubled:
        raise UsageError(
            f"{sources[0]} gives {doubled[0]} to several tasks; each task needs its own address."
        )
    tasks = {"worker": tuple(addresses)} if len(addresses) > 1 else {}
    return Topology(tasks, "worker", index, platform=platform, sources=tuple(sources), **options)
