"""100,000 steps: memory, open files and threads stay constant, and files do not grow without limit."""

import json
import os
import threading
from pathlib import Path

import ctl
import pytest
from small_models import Small

pytestmark = pytest.mark.slow
STEPS = 100_000


def rss_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def files_of(directory):
    return sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())


class Watched(Small):
    def after_loop(self, step, means):
        if step % 10_000 == 0:
            self._seen.append({
                "step": step, "rss": rss_mib(), "files": len(os.listdir("/proc/self/fd")),
                "threads": threading.active_count(), "bytes": files_of(self.model_dir),
            })  # fmt: skip


def test_a_long_run_grows_neither_memory_nor_files_nor_threads(tmp_path):
    intervals = ctl.Intervals(steps_per_loop=100, log=ctl.Every(steps=1000), save=ctl.Every(steps=5000))
    trainer = Watched(strategy="default", model_dir=tmp_path, intervals=intervals)
    trainer._seen = []
    trainer.train(STEPS)
    settled, last = trainer._seen[2], trainer._seen[-1]
    print(json.dumps([settled, last]))
    assert last["rss"] - settled["rss"] < 64, (settled, last)
    assert last["files"] <= settled["files"] + 2 and last["threads"] <= settled["threads"] + 1
    logged = STEPS / 1000
    assert last["bytes"] < 2**20 + logged * 2000, "a thousand numbers are no gigabyte"
