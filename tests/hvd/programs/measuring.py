"""Shared helpers of these tests: identical data for any number of ranks, and counters of requests."""

import json

import numpy as np
from ctl import hvd
from ctl.hvd import process

GLOBAL_BATCH = 12


def shared(*arrays, global_batch_size=GLOBAL_BATCH):
    """This rank's examples: of every global batch, each `size`-th."""
    rank, size = hvd.rank(), hvd.size()
    starts = range(0, len(arrays[0]), global_batch_size)
    parts = [np.concatenate([a[i : i + global_batch_size][rank::size] for i in starts]) for a in arrays]
    return parts if len(parts) > 1 else parts[0]


def batches(*arrays, global_batch_size=GLOBAL_BATCH):
    """This rank's part of every global batch."""
    count = global_batch_size // hvd.size()
    shards = [shared(a, global_batch_size=global_batch_size) for a in arrays]
    return [[a[i : i + count] for a in shards] for i in range(0, len(shards[0]), count)]


def examples(count=48, seed=0):
    """Inputs `[n, 5]` and targets `[n, 3]`, the same everywhere."""
    numbers = np.random.default_rng(seed)
    return (
        numbers.normal(size=(count, 5)).astype("float32"),
        numbers.normal(size=(count, 3)).astype("float32"),
    )


def comparable(variables):
    """Numbers to compare nearly, and bits to compare exactly."""
    flat = np.concatenate([np.ravel(np.asarray(v)) for v in variables])
    return {"numbers": flat.astype(float).tolist(), "bits": flat.tobytes().hex()}


class RequestRecorder:
    """Records the names of the collectives that this rank requests inside of the block."""

    def __enter__(self):
        self.names = []
        self._engine = process.engine()
        submit = self._engine.submit

        def counting(operation, name, *args, **kwargs):
            self.names.append(name)
            return submit(operation, name, *args, **kwargs)

        self._engine.submit = counting
        return self

    def __exit__(self, *_):
        del self._engine.submit

    def gradients(self):
        return [n for n in self.names if "gradients" in n]


def run(cases, names=()):
    """Runs all functions, or those that are named, and prints their results as one line of JSON."""
    hvd.init()
    print(json.dumps({c.__name__: c() for c in cases if c.__name__ in names or not names}))
    hvd.shutdown()
