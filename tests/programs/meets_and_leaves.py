"""A worker that completes the startup barrier and exits before TensorFlow connects.

python meets_and_leaves.py [INDEX_THAT_LEAVES [STARTUP_TIMEOUT_SECS]]
"""

import json
import os
import sys

import ctl
import tensorflow as tf
from ctl.distribute import job_fingerprint, startup_barrier
from ctl.distribute.platforms import detection

topology = detection.read_topology()
if len(sys.argv) > 1 and topology.worker_index == int(sys.argv[1]):
    startup_barrier.run_barrier(topology, job_fingerprint.fingerprint_of_process(0, {}), 60.0)
    os._exit(0)
startup_timeout_secs = float(sys.argv[2]) if len(sys.argv) > 2 else 8.0
ctl.make_strategy("multi_worker", startup_timeout_secs=startup_timeout_secs)
print(json.dumps({"tensorflow": tf.__version__}))
