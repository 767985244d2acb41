"""Ranks as real processes on loopback, for the tests of `ctl.hvd`.

for code, stdout, stderr in run_ranks(PROGRAMS / "average.py", 3):
    assert code == 0, stderr
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import ROOT, free_ports
from processes import start

PROGRAMS = Path(__file__).resolve().parent / "programs"
TIMEOUT_SECS = 600


def rank_environment(rank: int, addresses: Sequence[str], **extra: str) -> dict[str, str]:
    """Returns the variables that the launcher sets for one rank of those that listen at `addresses`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "TF_CONFIG"))}
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    size = str(len(addresses))
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PROGRAMS)]),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CONFIG": json.dumps(config),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        **extra,
    }


def run_ranks(
    program: Path | str,
    np: int,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    timeout_secs: float = TIMEOUT_SECS,
) -> list[tuple[int, str, str]]:
    """Runs a file (a Path) or a text of Python as `np` ranks; (exit code, stdout, stderr) of each.

    A rank that is still running after `timeout_secs` is killed, and has the exit code of that, -9.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(np)]
    called = [str(program)] if isinstance(program, Path) else ["-c", program]
    with tempfile.TemporaryDirectory() as folder:
        streams = [[Path(folder, f"{rank}.{i}") for i in (1, 2)] for rank in range(np)]
        processes = []
        try:
            for rank, (out, err) in enumerate(streams):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    processes.append(
                        start(
                            [sys.executable, *called, *arguments],
                            env=rank_environment(rank, addresses, **(environ or {})),
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=stdout,
                            stderr=stderr,
                        )
                    )
            _wait(processes, time.monotonic() + timeout_secs)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [[path.read_text(errors="replace") for path in pair] for pair in streams]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, texts, strict=True)]


def results(program: Path | str, np: int, *arguments: str, **options) -> list[dict]:
    """Runs a program that must succeed on all ranks. Returns the last JSON line of each rank."""
    outputs = run_ranks(program, np, *arguments, **options)
    report = "\n".join(f"rank {i}: {code}\n{err[-3000:]}" for i, (code, _, err) in enumerate(outputs))
    assert [code for code, _, _ in outputs] == [0] * np, report
    return [
        json.loads([line for line in out.splitlines() if line.startswith("{")][-1]) for _, out, _ in outputs
    ]


def _wait(processes: list[subprocess.Popen], deadline: float) -> None:
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
