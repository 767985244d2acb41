"""A signal handler raises an exception while rank 0 waits in a collective. Prints what both ranks have.

Rank 1 calls the same collective only after that. Both then call another one.
"""

import functools
import json
import os
import signal

import forked_ranks
import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

ROWS, NUM_REPEATED = 1 << 10, 12


class Interrupted(Exception):
    """Raised by the signal handler."""


def interrupt(signum, frame):
    raise Interrupted


def run(rank, engine, interrupted):
    def total(name):
        array = np.full(ROWS, rank + 1.0, np.float32)
        return engine.wait(engine.submit("allreduce", name, [array], op=SUM))[0]

    outcome = {"totals": [], "is_interrupted": False}
    for _ in range(NUM_REPEATED):  # so that rank 0 no longer negotiates them
        total("repeated")
    outcome["repeats"] = engine._repetition.is_repeating
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            total("repeated")
        except Interrupted:
            outcome["is_interrupted"] = True
        os.write(interrupted[1], b"1")
    else:
        os.read(interrupted[0], 1)
        outcome["totals"].append(float(total("repeated").sum()))
    outcome["totals"] += [float(total(name).sum()) for name in ("repeated", "another")]
    engine.close(linger=True)
    return outcome


def run_rank(rank, addresses, server, *, interrupted):
    return run(rank, Engine(build_ranks(addresses, rank), Settings(), server=server), interrupted)


if __name__ == "__main__":
    outcomes, _ = forked_ranks.run(functools.partial(run_rank, interrupted=os.pipe()), ["127.0.0.1"] * 2)
    print(json.dumps({"ranks": outcomes}))
