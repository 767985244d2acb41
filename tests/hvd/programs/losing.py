"""A rank that stops as selected by the command line. The other ranks print their errors."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ctl.hvd as hvd
import tensorflow as tf

failure, size, directory, late_secs = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
hvd.init()
last = hvd.rank() == hvd.size() - 1
step = tf.function(hvd.allreduce)
x = tf.ones([size])
step(x)
hvd.allreduce(x)
hvd.barrier()
if last:
    if failure == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure == "kill_in_the_middle":  # other ranks have received a part of a ring
        from ctl.hvd import process

        process.engine().submit("allreduce", "HorovodAllreduce", [x.numpy()], op=hvd.Average)
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure == "exit":
        sys.exit(0)
    elif failure == "raise":
        raise RuntimeError("on purpose")
    elif failure == "shutdown":
        hvd.shutdown()
        time.sleep(15)
    elif failure == "late":
        time.sleep(late_secs)
        hvd.allreduce(x)
        sys.exit(0)
errors = []
for call in (
    (hvd.allreduce, step, lambda t: hvd.broadcast_object(1)) if failure != "late" else (hvd.allreduce,)
):
    start = time.monotonic()
    try:
        call(x)
        errors.append(["no error", "", 0.0])
    except hvd.HorovodInternalError as e:
        errors.append([type(e).__name__, str(e), time.monotonic() - start])
print(json.dumps({"said": errors}), flush=True)
(directory / f"said_{hvd.rank()}").touch()
deadline = time.monotonic() + 600
while (
    hvd.rank() == 0 and len(list(directory.glob("said_*"))) < hvd.size() - 1
):  # it responds to the other ranks
    if time.monotonic() > deadline:
        sys.exit("the others said nothing")
    time.sleep(0.02)
os._exit(0)
