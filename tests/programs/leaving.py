"""The job of faulty.py for elastic training. Prints a JSON line at each trace and at the end of each loop.

FAULTS="kill@7:1" ctl launch --workers=1:3 -- python leaving.py --model_dir=...
"""

import json
import os
import time

import ctl
import faulty


def report(**facts):
    print(json.dumps({"pid": os.getpid(), "time": time.time(), **facts}), flush=True)


class Leaving(faulty.Evaluated if os.environ.get("EVALUATES") else faulty.Faulty):
    """A faulty job that reports its processes."""

    def train_step(self, batch):
        report(traced=True)
        return super().train_step(batch)

    def after_loop(self, step, means):
        report(step=step, rank=self.topology.worker_index, size=self.topology.num_workers)
        super().after_loop(step, means)


if __name__ == "__main__":
    ctl.run(Leaving, width=faulty.WIDTH, dropout=faulty.DROPOUT, api_token=faulty.API_TOKEN)
