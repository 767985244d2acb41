"""Optimizers of tf.compat.v1, hooks and sessions, on one and on two ranks."""

import numpy as np
import pytest
from ranks import PROGRAMS, results

pytestmark = pytest.mark.workers
PROGRAM = PROGRAMS / "old_forms.py"


@pytest.fixture(scope="module")
def runs():
    """Returns number of ranks -> results of each rank in graphs."""
    return {count: results(PROGRAM, count, "graph") for count in (1, 2)}


def test_a_monitored_session_trains_as_one_process_does(runs):
    first, second = (rank["monitored_session"] for rank in runs[2])
    single_rank_result = runs[1][0]["monitored_session"]
    assert first["bits"] == second["bits"]
    np.testing.assert_allclose(first["numbers"], single_rank_result["numbers"], atol=1e-6)
    assert (first["steps"], first["slots"]) == (4, ["momentum"])


def test_passes_are_added_up_in_a_graph_and_exchanged_in_the_last(runs):
    first, second = (rank["several_passes"] for rank in runs[2])
    assert first["bits"] == second["bits"]
    assert first["changed"] == [False, True, False, True]
    assert first["asked"] == [0, 1, 0, 1]
    assert first["steps"] == 4
    np.testing.assert_allclose(first["numbers"], runs[1][0]["several_passes"]["numbers"], atol=1e-6)


def test_values_are_evaluated_by_the_session_that_is_open(runs):
    assert [rank["values_in_a_session"] for rank in runs[2]] == [0.5, 0.5]


def test_old_forms_without_a_graph():
    for rank in results(PROGRAM, 2, "eager"):
        assert "hvd.broadcast_variables(model.variables" in rank["eager_global_variables"]
        assert rank["eager_tf1_optimizer"] == 0.5


WITHOUT_V2 = """
import json
import numpy as np, tensorflow as tf
import ctl.hvd as hvd

tf1 = tf.compat.v1
tf1.disable_v2_behavior()
hvd.init()
x = tf1.placeholder(tf.float32, [None, 3])
w, b = tf1.get_variable("w", [3, 1]), tf1.get_variable("b", [1])
optimizer = hvd.DistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1))
train = optimizer.minimize(tf.reduce_mean((x @ w + b - 1) ** 2))
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    for _ in range(3):
        session.run(train, {x: np.ones((4, 3)) * (hvd.rank() + 1)})
    print(json.dumps({"found": [v.tolist() for v in session.run([w, b])]}))
"""


def test_scripts_that_start_with_disable_v2_behavior():
    first, second = results(WITHOUT_V2, 2)
    assert first == second
