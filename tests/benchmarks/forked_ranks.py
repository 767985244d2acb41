"""Forks of a benchmark as the ranks of a group."""

import json
import os
from collections.abc import Callable
from typing import Any


def run_forked(count: int, run_rank: Callable[[int], Any]) -> list[Any]:
    """Calls `run_rank(rank)` in a fork for each rank. Returns the results by rank, which are JSON values.

    Raises RuntimeError if a rank ends without a result.
    """
    readers, pids = [], []
    for rank in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with os.fdopen(writer, "w") as file:
                    json.dump(run_rank(rank), file)
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
        pids.append(pid)
    texts = []
    for reader in readers:
        with os.fdopen(reader) as file:
            texts.append(file.read())
    for pid in pids:
        os.waitpid(pid, 0)
    failed = [rank for rank, text in enumerate(texts) if not text]
    if failed:
        raise RuntimeError(f"ranks without a result: {failed}")
    return [json.loads(text) for text in texts]
