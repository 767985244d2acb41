"""Rows of all replicas in a step: losses between examples and their gradients equal those of one device."""

import correctness
import ctl
import numpy as np
import pytest
import tensorflow as tf
from correctness import BATCH, Contrast, outcome

NO_FILES = dict(global_batch_size=BATCH, writers=[])


def test_a_loss_between_all_examples_trains_as_a_loop_by_hand_does(two_replicas):
    trainer = Contrast(strategy="default", **NO_FILES)
    trainer.build()
    variables, expected = trainer.model.trainable_variables, []
    for batch in trainer.train_data(BATCH).take(9):
        with tf.GradientTape() as tape:
            losses = trainer.compared(batch, lambda rows: (rows, 0))
            loss = tf.reduce_sum(losses) / BATCH
        trainer.optimizer.apply(tape.gradient(loss, variables), variables)
        expected.append(tf.reduce_mean(losses))
    assert np.ptp(expected) > 1.0
    for strategy in ("default", two_replicas):
        result = outcome("contrast", strategy)
        np.testing.assert_allclose(result["losses"], expected, atol=1e-4)
        np.testing.assert_allclose(result["weights"][0], variables[0].numpy(), atol=1e-5)


def test_gather_is_refused_where_rows_are_not_available_at_once(two_replicas):
    accumulating = correctness.with_gradients(Contrast, accumulate_steps=2)(strategy="default", **NO_FILES)
    with pytest.raises(ctl.UsageError, match=r"gather\(\) with accumulate_steps=2"):
        accumulating.train(1)
    with pytest.raises(ctl.UsageError, match=r"gather\(\) exchanges rows.*jit_compile"):
        Contrast(strategy=two_replicas, jit_compile=True, **NO_FILES).train(1)

    class Scalar(Contrast):
        def train_step(self, batch):
            self.gather(tf.reduce_sum(batch[0]))

    with pytest.raises(ctl.UsageError, match="got a scalar; expected one row per example"):
        Scalar(strategy="default", **NO_FILES).train(1)


def test_batches_larger_than_the_gather_buffer_are_an_error(two_replicas):
    class Large(Contrast):
        def eval_data(self, batch_size):
            return self.train_data(2 * batch_size).take(1)

        def eval_step(self, batch):
            return {"loss": self.compared(batch, self.gather)}

    with pytest.raises(tf.errors.InvalidArgumentError, match="got more than 4 rows"):
        Large(strategy=two_replicas, **NO_FILES).evaluate()
