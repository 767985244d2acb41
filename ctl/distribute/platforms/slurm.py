"""Topology of a Slurm job step.

`srun` gives each task its number. Hosts are a list such as `n[1-3,7],gpu-a` in the order of the tasks, and
tasks per host have the form `2(x3),1` (Slurm, "sbatch", output environment variables).
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctl.distribute.platforms import variables
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

SLURM = "Slurm"
_FIRST_PORT = 15000
_PORTS_OF_A_STEP = 16  # separates jobs with consecutive numbers on one host
_BLOCKS = 1000  # 15000 + 16 * 1000 is below the ephemeral ports of common systems
_BLOCKS_BETWEEN_STEPS = 389  # a prime; separates steps of one job and of jobs with similar numbers
_FIRST_STEP_OF_SLURM_S_OWN = 0xFFFFFFF0  # the batch script is a step with such a number
_MOST_DIGITS = 9
MOST_HOSTS = 100_000  # in one job; a longer list is a mistake
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from srun, or None outside of Slurm. Raises UsageError.

    The batch script of a job of several tasks, without `srun`, is one process, with a note.
    """
    number = variables.number(environ, "SLURM_PROCID")
    job_id = variables.number(environ, "SLURM_JOB_ID")
    if number is None and job_id is None:
        return None
    counter = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    count = variables.number(environ, counter) if counter else 1
    listed = _list_of_hosts(environ)
    if number is None or listed is None:
        several = (count or 1) > 1
        return Topology(
            platform=SLURM,
            sources=("SLURM_JOB_ID",),
            notes=(
                f"{counter} is {count}, but srun was not used, so this process trains alone. Start the "
                "program with `srun python ...`; `ctl deploy slurm` writes such a script.",
            )
            if several
            else (),
        )
    per_host = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    used = "SLURM_PROCID", counter, listed, per_host, "SLURM_JOB_ID"
    sources = [name for name in used if name]
    names = host_names(environ[listed])
    if per_host:
        counts = tasks_of_hosts(environ[per_host], len(names))
    else:
        counts = [-(-((count or len(names)) - i) // len(names)) for i in range(len(names))]
    placed = _placed(environ, names, counts)
    if (count is not None and count != len(placed)) or number >= len(placed):
        raise UsageError(
            f"SLURM_PROCID is {number} of {count} tasks, but {listed}={environ[listed]} with "
            f"{per_host}={environ.get(per_host or '', '')} describe {len(placed)} tasks. Is "
            "this the environment of one srun?"
        )
    _check_place(environ, placed, number, names)
    settings = _gpus(environ, placed[number][1], counts[names.index(placed[number][0])])
    listed_addresses = addresses(environ, placed, variables.number(environ, "SLURM_STEP_ID") or 0)
    return variables.workers(
        SLURM, sources, listed_addresses, number, settings=settings,
        port_variable=variables.PORT_VARIABLE,
        ports_change=variables.number(environ, variables.PORT_VARIABLE) is None,
    )  # fmt: skip


def host_names(text: str) -> list[str]:
    """Expands a list of hosts in its order: `n[08-10],m[1,3]x` -> ["n08", "n09", "n10", "m1x", "m3x"]."""
    names = [name for part in _split(text) for name in _expanded(part)]
    if not names or any(not name for name in names):
        raise UsageError(
            f"Slurm's list of hosts is {text!r}; expected one such as n[1-3],m1 in SLURM_STEP_NODELIST."
        )
    return names


def tasks_of_hosts(text: str, num_hosts: int) -> list[int]:
    """Parses `2(x3),1` as [2, 2, 2, 1]. Raises UsageError if there is not one number for each host."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"Slurm's tasks per host are {text!r}; expected numbers such as 2(x3),1, as in "
                "SLURM_STEP_TASKS_PER_NODE."
            )
        if len(part) > _MOST_DIGITS * 2 or int(match[2] or 1) > MOST_HOSTS:
            raise UsageError(f"Slurm's tasks per host are {text[:80]!r}; expected <= {MOST_HOSTS} hosts.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != num_hosts:
        raise UsageError(
            f"Slurm's tasks per host are {text!r}, for {len(counts)} hosts, but its list has {num_hosts}."
        )
    return counts


def first_port(environ: Mapping[str, str], tasks_of_a_host: int, step: int = 0) -> int:
    """Returns the first port of a job step on each host, from the numbers of job and step."""
    job_id = variables.number(environ, "SLURM_JOB_ID") or 0
    block_size = _PORTS_OF_A_STEP
    while block_size < tasks_of_a_host:
        block_size *= 2
    blocks = max(1, _BLOCKS * _PORTS_OF_A_STEP // block_size)
    return _FIRST_PORT + (job_id + step * _BLOCKS_BETWEEN_STEPS) % blocks * block_size


def placed_in_blocks(names: Sequence[str], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Returns (host, index on that host) of each task, host by host."""
    return [(host, i) for host, many in zip(names, counts, strict=True) for i in range(many)]


def addresses(environ: Mapping[str, str], placed: Sequence[tuple[str, int]], step: int = 0) -> list[str]:
    """Returns "host:port" of each task, on ports of this job and step."""
    most = 1 + max(i for _, i in placed)
    first = variables.port(environ, first_port(environ, most, step))
    return [f"{host}:{first + i}" for host, i in placed]


def _placed(
    environ: Mapping[str, str], names: Sequence[str], counts: Sequence[int]
) -> list[tuple[str, int]]:
    """Returns (host, index on that host) of each task in the order of `srun --distribution`.

    All tasks reject an order that the environment does not describe, so no task waits for another one.
    """
    distribution = environ.get("SLURM_DISTRIBUTION", "").strip().lower()
    method = re.split("[:,]", distribution)[0]
    if method in ("", "block", "*"):
        return placed_in_blocks(names, counts)
    if method == "cyclic":
        return _placed_in_rounds(names, counts, 1)
    plane_size = variables.number(environ, "SLURM_DIST_PLANESIZE")
    if method.startswith("plane") and plane_size:
        return _placed_in_rounds(names, counts, plane_size)
    raise UsageError(
        f"SLURM_DISTRIBUTION is {distribution!r:.80}; expected block, cyclic or plane, whose order of "
        "tasks is known. Start the tasks with `srun --distribution=block`."
    )


def _placed_in_rounds(names: Sequence[str], counts: Sequence[int], chunk: int) -> list[tuple[str, int]]:
    """Returns (host, index on that host) of tasks that are assigned `chunk` at a time to each free host."""
    return [
        (host, i)
        for first in range(0, max(counts), chunk)
        for host, count in zip(names, counts, strict=True)
        for i in range(first, min(first + chunk, count))
    ]


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name, "").strip()), None)


def _list_of_hosts(environ: Mapping[str, str]) -> str | None:
    """Returns the variable that lists the hosts of this step; None in the job's batch script."""
    if environ.get("SLURM_STEP_NODELIST", "").strip():
        return "SLURM_STEP_NODELIST"
    step = variables.number(environ, "SLURM_STEP_ID")
    is_step = step is not None and step < _FIRST_STEP_OF_SLURM_S_OWN
    if not is_step and not variables.number(environ, "SLURM_PROCID"):
        return None
    return _first(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def _split(text: str) -> Iterator[str]:
    """Splits a list of hosts at commas outside of brackets."""
    if text.count("[") != text.count("]"):
        raise UsageError(f"Slurm's list of hosts is {text!r}; a bracket is not closed.")
    yield from (part.strip() for part in re.split(r",(?![^\[]*\])", text.strip()))


def _expanded(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # texts at even indices, ranges at odd ones
    choices = [_range(p, part) if i % 2 else [p] for i, p in enumerate(pieces)]
    _check_count(math.prod(map(len, choices)), part)
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _range(text: str, part: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        is_valid = _is_number(low) and (not dash or _is_number(high))
        if not is_valid or (dash and int(high) < int(low)):
            raise UsageError(f"Slurm's list of hosts has {part[:80]!r}; expected ranges such as [1-3,7].")
        width = len(low)
        _check_count(len(names) + int(high or low) - int(low) + 1, part)
        names += [f"{i:0{width}d}" for i in range(int(low), int(high or low) + 1)]
    return names


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _check_count(hosts: int, part: str) -> None:
    if hosts > MOST_HOSTS:
        raise UsageError(
            f"Slurm's list of hosts has {part[:80]!r}, which is {hosts:,} hosts; expected at most "
            f"{MOST_HOSTS:,}."
        )


def _check_place(environ: Any, placed: list[tuple[str, int]], number: int, names: list[str]) -> None:
    """Raises UsageError if SLURM_NODEID or SLURM_LOCALID differs from the computed values."""
    host, local = placed[number]
    came = variables.number(environ, "SLURM_NODEID"), variables.number(environ, "SLURM_LOCALID")
    expected = names.index(host), local
    if any(a is not None and a != b for a, b in zip(came, expected, strict=True)):
        distribution = environ.get("SLURM_DISTRIBUTION") or "block"
        raise UsageError(
            f"task {number} has SLURM_NODEID={came[0]} and SLURM_LOCALID={came[1]}; expected "
            f"{expected[0]} and {expected[1]} with the distribution {distribution}. Start the "
            "tasks with `srun --distribution=block`."
        )


def _gpus(environ: Mapping[str, str], local: int, tasks: int) -> dict[str, str]:
    """Returns the setting of this task's share of the host's GPUs.

    The result is empty if CUDA_VISIBLE_DEVICES is set, for a single task, or if the host has fewer GPUs
    than tasks, so that each task uses all of them.
    """
    listed = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    gpus = [g for g in listed.split(",") if g.strip()]
    if "CUDA_VISIBLE_DEVICES" in environ or tasks < 2 or len(gpus) < tasks:
        return {}
    share = len(gpus) // tasks
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[local * share : (local + 1) * share])}
