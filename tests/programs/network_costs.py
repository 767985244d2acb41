"""Three ranks at two loopback addresses. Prints their costs of the network and numbers of exchanges."""

import json

import forked_ranks
import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts

HOSTS = "127.0.0.1", "127.0.0.1", "127.0.0.2"
ROWS, LATENCY_SECS = 1 << 20, 0.25
NUM_REPEATED = 20


def run(engine):
    exchanges, mesh = [], engine._mesh
    original = mesh.exchange

    def exchange(*arguments, **keywords):
        exchanges.append(arguments)
        return original(*arguments, **keywords)

    mesh.exchange = exchange

    def num_exchanges(name):
        """Returns the number of exchanges of an all-reduce of 4 MB."""
        before = len(exchanges)
        array = np.full(ROWS, engine.ranks.rank + 1.0, np.float32)
        (total,) = engine.wait(engine.submit("allreduce", name, [array], op=SUM))
        correct.append(bool((total == 6).all()))
        return len(exchanges) - before

    correct, counts = [], {}
    outcome = {"measured": list(engine.network), "exchanges": counts, "correct": correct}
    engine.agree_on_links(ONE_MACHINE)
    counts["one_machine"] = num_exchanges("on one machine")
    engine.agree_on_links(NetworkCosts(LATENCY_SECS))
    outcome["recorded"] = list(engine.network)
    counts["recorded"] = num_exchanges("recorded")
    for _ in range(NUM_REPEATED):
        counts["repeated"] = num_exchanges("repeated")
        outcome["repeats"] = engine._repetition.is_repeating
    outcome["correct"] = all(correct)
    return outcome


def run_rank(rank, addresses, server):
    engine = Engine(build_ranks(addresses, rank), Settings(), server=server)
    engine.agree_on_links()
    return run(engine)


def main():
    outcomes, _ = forked_ranks.run(run_rank, HOSTS)
    print(json.dumps({"ranks": outcomes}))


if __name__ == "__main__":
    main()
