"""Several backward passes before an exchange: the count of passes survives an exchange that failed."""

import numpy as np
import pytest
import tensorflow as tf
from ctl.hvd import aggregation
from ctl.hvd.aggregation import Aggregator

VARIANTS = {"eager": lambda f: f, "function": tf.function}


class Job:
    """An aggregator of two passes with exchanges that fail while `fails` is set."""

    def __init__(self, variant, fails=False):
        self.aggregator, self.fails, self.exchanged = Aggregator(2, averages=False), fails, []
        self.variable = tf.Variable([0.0, 0.0])
        self.run = VARIANTS[variant](self._run)

    def _run(self, gradient):
        (aggregated,) = self.aggregator([gradient], [self.variable], self._reduce)
        return aggregated

    def _reduce(self, gradients):
        return [tf.ensure_shape(tf.numpy_function(self._exchange, gradients, tf.float32), [2])]

    def _exchange(self, total):
        if self.fails:
            raise RuntimeError("a rank is gone")
        self.exchanged.append(np.array(total).tolist())
        return total

    def step(self, value):
        return self.run(tf.constant([value, value])).numpy().tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_a_failed_exchange_the_passes_are_counted_anew(variant):
    job = Job(variant, fails=True)
    job.step(1.0)
    with pytest.raises((RuntimeError, tf.errors.OpError), match="a rank is gone"):
        job.step(2.0)
    job.fails = False
    assert [job.step(value) for value in (10.0, 20.0, 100.0, 200.0)] == [
        [10.0] * 2, [30.0] * 2, [100.0] * 2, [300.0] * 2,
    ]  # fmt: skip
    assert job.exchanged == [[30.0] * 2, [300.0] * 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_when_the_ranks_change_all_begin_with_the_first_pass(variant):
    job = Job(variant)
    job.step(1.0)
    aggregation.reset_all()
    job.step(10.0)
    assert job.step(20.0) == [30.0] * 2
