"""A failure selected by the command line. Every rank prints the results of its calls.

    python breaking.py HOW DIRECTORY

In DIRECTORY the ranks notify each other that they have printed.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import ctl.hvd as hvd
import tensorflow as tf
from ctl.collectives.negotiation import Negotiation
from ctl.hvd import process

failure, directory = sys.argv[1], Path(sys.argv[2])
LARGE = tf.ones([2_000_000])
held = []
if failure == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
hvd.init()
last = hvd.rank() == hvd.size() - 1
pids = hvd.allgather_object(os.getpid())
hvd.allreduce(LARGE)
hvd.barrier()  # all have its result


def common():
    return hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy().item()


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def rounds(count, one_more):
    for number in range(count + 1):
        if number == count:
            if hvd.rank() != one_more:
                return "done"
            while failure == "round_more_when_alone" and is_running(pids[0]):
                time.sleep(0.05)
        common()
    return "one more"


def train():  # noqa: PLR0912  one branch for each way
    if failure == "timeline":
        hvd.start_timeline("/dev/full", mark_cycles=True)
    elif failure == "coordinator" and hvd.rank() == 0:

        def fail(self):
            raise RuntimeError("on purpose")

        Negotiation.send_responses = fail
    elif failure.startswith("stop"):
        victim = 0 if failure == "stop_rank_0" else hvd.size() - 1
        if hvd.rank() == victim:
            if failure == "stop_in_an_exchange":  # other ranks have received a part of it
                process.engine()._mesh.exchange = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
    elif failure == "one_more":
        for _ in range(3):
            common()
        if last:
            hvd.allreduce(tf.constant(5.0), op=hvd.Sum)
        return common() + common()
    elif failure.startswith("round_more"):
        return rounds(3, 0 if failure == "round_more_of_rank_0" else hvd.size() - 1)
    elif failure == "branches":
        if hvd.rank() == 0:
            total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
        else:
            total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
        return total.numpy().item() + common()
    hvd.allreduce(LARGE)
    return common()


start = time.monotonic()
try:
    outcome = ["no error", train()]
except (hvd.HorovodInternalError, tf.errors.OpError) as e:
    outcome = [type(e).__name__, str(e)]
print(json.dumps({"said": outcome, "secs": time.monotonic() - start}), flush=True)
if failure.startswith("stop"):
    victim = 0 if failure == "stop_rank_0" else hvd.size() - 1
    (directory / f"said_{hvd.rank()}").touch()
    deadline = time.monotonic() + 600
    while len(list(directory.glob("said_*"))) < hvd.size() - 1:  # all ranks have detected it
        if time.monotonic() > deadline:
            sys.exit("the others said nothing")
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        os.kill(pids[victim], signal.SIGKILL)
    os._exit(0)
