"""Training in an elastic job until step DONE, with a line of output per step.

python elastic_training.py DIRECTORY DONE

DIRECTORY/go is the step up to which to train, as rank 0 reads it; in the step in DIRECTORY/die the last
rank kills itself. Process 0 takes the port in DIRECTORY/port once, as if a program had come to listen
there just after it was found free. Prints a JSON line per step. Each step
adds 1 to the weight on any number of ranks, so that a step that is lost or done twice shows.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ctl.hvd as hvd
import tensorflow as tf
from ctl.collectives.transfer_costs import ONE_MACHINE
from ctl.hvd import elastic, elastic_line, process_sets
from ctl.launch.ports import free_ports

HERE, DONE = Path(sys.argv[1]), int(sys.argv[2])


def may_go_to() -> int:
    try:
        return int((HERE / "go").read_text() or 0)
    except (FileNotFoundError, ValueError):
        return DONE


def print_facts(**facts) -> None:
    print(json.dumps({"pid": os.getpid(), **facts}), flush=True)


def found_ports(*arguments) -> list[int]:
    port = HERE / "port"
    if os.environ["CTL_HVD_WORKER"] == "0" and port.exists():
        ports = [int(port.read_text())]
        port.unlink()
        return ports
    return free_ports(*arguments)


elastic_line.free_ports = found_ports
hvd.init()
weight = tf.Variable(0.0)
state = elastic.TensorFlowState(variables=[weight], step=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


@elastic.run
def train(state) -> None:
    while state.step < DONE:
        if state.step >= hvd.broadcast_object(may_go_to(), name="go"):
            time.sleep(0.02)
            state.check_host_updates()
            continue
        state.step += 1
        die = HERE / "die"
        if die.exists() and int(die.read_text()) == state.step and hvd.rank() == hvd.size() - 1 > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        weight.assign_add(hvd.allreduce(tf.constant(float(state.step)), name="gradient") / state.step)
        equal = hvd.allgather(tf.reshape(weight, [1]), name="weights").numpy().tolist()
        engine = process_sets._engine
        print_facts(
            step=state.step, rank=hvd.rank(), size=hvd.size(), weights=equal, resets=resets,
            is_measured=engine.network != ONE_MACHINE, shares_memory=engine.all_share_memory,
        )  # fmt: skip
        state.commit()


train(state)
print_facts(done=state.step, rank=hvd.rank(), size=hvd.size(), weight=float(weight.numpy()))
