"""The engine in processes that have not imported TensorFlow."""

import json
import subprocess
import sys

from conftest import TIMEOUT_SECS, environment

TWO_RANKS = """
import json, os, socket, sys
import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
rank = 0 if os.fork() else 1
engine = Engine(build_ranks(addresses, rank), Settings(), server=servers[rank])
total = engine.sum("equal shapes", np.full(3, rank + 1.0))
try:
    engine.sum("other shapes", np.zeros(2 + rank))
except Exception as e:
    error = type(e).__name__, str(e)
engine.close(linger=True)
if rank == 0:
    os.wait()
    print(json.dumps([total.tolist(), error, "tensorflow" in sys.modules]))
"""


def test_ranks_sum_numbers_and_refuse_different_shapes_without_importing_tensorflow():
    command = [sys.executable, "-c", TWO_RANKS]
    output = subprocess.check_output(command, env=environment(), text=True, timeout=TIMEOUT_SECS)
    total, (error_type, message), has_imported_tensorflow = json.loads(output)
    assert total == [3, 3, 3]
    assert error_type == "UsageError" and "[2]" in message and "[3]" in message
    assert not has_imported_tensorflow
