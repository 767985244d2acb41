"""A script of Horovod over MPI. Rank 0 prints a line of JSON."""

import json

import ctl.hvd as hvd
import tensorflow as tf
from ctl.hvd import process

hvd.init()
size = 200_000
total = hvd.allreduce(tf.fill([size], float(hvd.rank() + 1)), op=hvd.Sum)
half = hvd.allreduce(tf.fill([size], tf.constant(hvd.rank() + 1, tf.float16)), op=hvd.Sum)
if hvd.rank() == 0:
    results = {
        "size": hvd.size(), "sum": float(total[-1]), "half": float(half[-1]),
        "paths": sorted(set(process.engine()._mesh.paths.values())), "built": hvd.mpi_built(),
        "enabled": hvd.mpi_enabled(), "threads": hvd.mpi_threads_supported(), "gloo": hvd.gloo_enabled(),
    }  # fmt: skip
    print(json.dumps(results), flush=True)
