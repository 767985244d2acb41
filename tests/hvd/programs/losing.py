"""One rank stops taking part, in the way that the command line says; the others print what they saw."""

import json
import os
import signal
import sys
import time

import ctl.hvd as hvd
import tensorflow as tf

how, size = sys.argv[1], int(sys.argv[2])
hvd.init()
last = hvd.rank() == hvd.size() - 1
step = tf.function(hvd.allreduce)
x = tf.ones([size])
step(x)
hvd.allreduce(x)
hvd.barrier()
if last:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "kill_in_the_middle":  # others are between the first and the last byte of a ring
        from ctl.hvd import process

        process.engine().ask("allreduce", "HorovodAllreduce", [x.numpy()], op=hvd.Average)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(0)
    elif how == "raise":
        raise RuntimeError("on purpose")
    elif how == "shutdown":
        hvd.shutdown()
        time.sleep(15)
    elif how == "late":
        time.sleep(8)
        hvd.allreduce(x)
        sys.exit(0)
said = []
for call in (
    (hvd.allreduce, step, lambda t: hvd.broadcast_object(1)) if how != "late" else (hvd.allreduce,)
):
    start = time.monotonic()
    try:
        call(x)
        said.append(["no error", "", 0.0])
    except hvd.HorovodInternalError as e:
        said.append([type(e).__name__, str(e), time.monotonic() - start])
print(json.dumps({"said": said}), flush=True)
if hvd.rank() == 0:
    time.sleep(5)  # it answers the others, who may be slower
os._exit(0)
