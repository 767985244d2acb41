"""Collectives in changing order by seven ranks that send their requests through others. One may be lost.

    relayed_ranks.py FANOUT EVENT RANK

EVENT: none; exit: the process ends in step 20; stop: it is stopped; leave: it leaves; end: it leaves and
ends after the last step, before the others leave. Prints the error of each rank, or "none".
"""

import functools
import json
import os
import random
import signal
import sys
import time

import forked_ranks
import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

COUNT, STEPS, EVENT_STEP, STOP_SECS = 7, 40, 20, 15
SIZES = {"a": 3, "b": 500, "c": 3, "d": 100_000}


def strike(event, engine):
    if event == "exit":
        os._exit(0)
    elif event == "stop":
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(STOP_SECS)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
    elif event == "leave":
        engine.close()


def run_steps(engine, rank, event, struck_rank):
    for step in range(STEPS):
        if step == EVENT_STEP and rank == struck_rank:
            strike(event, engine)
        names = random.Random(step).sample(sorted(SIZES), len(SIZES))
        pending = [
            engine.submit("allreduce", name, [np.full(SIZES[name], rank + step, np.float32)], op=SUM)
            for name in names
        ]
        for one in pending:
            (total,) = engine.wait(one)
            if not (total == sum(range(COUNT)) + COUNT * step).all():
                return "wrong numbers"
        (gathered,) = engine.wait(engine.submit("allgather", "rows", [np.full((rank + 1, 2), rank)]))
        if gathered.reshape(-1, 2)[:, 0].tolist() != [r for r in range(COUNT) for _ in range(r + 1)]:
            return "wrong rows"
    return "none"


def result_of(rank, addresses, server, *, fanout, event, struck_rank):
    settings = Settings(fanout=fanout, heartbeat_timeout=3.0 if event == "stop" else 0.0)
    engine = Engine(build_ranks(addresses, rank), settings, server=server)
    engine.agree_on_links()
    try:
        result = run_steps(engine, rank, event, struck_rank)
    except HorovodInternalError as e:
        result = str(e)
    if event == "end" and rank == struck_rank:
        engine.close()
        os._exit(0)
    if event == "end":
        time.sleep(1.0)
    engine.close(linger=event == "none")
    return result


if __name__ == "__main__":
    fanout, event, struck_rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    function = functools.partial(result_of, fanout=fanout, event=event, struck_rank=struck_rank)
    outcomes, _ = forked_ranks.run(function, ["127.0.0.1"] * COUNT)
    print(json.dumps({"outcomes": outcomes}))
