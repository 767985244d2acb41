"""Reads of ON_READ variables with SUM aggregation. Each read is a sum over all workers."""

import ctl
import tensorflow as tf
from small_models import Small, every_step
from tensorflow.python.distribute import values


def counter():
    return tf.Variable(
        tf.zeros([300]), trainable=False, aggregation=tf.VariableAggregation.SUM,
        synchronization=tf.VariableSynchronization.ON_READ,
    )  # fmt: skip


class Counting(Small):
    def build(self):
        super().build()
        self.step_counts, self.listed, self.by_name = counter(), [counter()], {"a": counter()}

    def train_step(self, batch):
        self.step_counts.assign_add(tf.ones([300]))
        return super().train_step(batch)


def test_a_training_reads_no_variable_that_it_does_not_save(two_replicas, monkeypatch, tmp_path):
    reads = []
    read = values.SyncOnReadVariable._get_cross_replica

    def counted_read(variable):
        reads.append(variable)
        return read(variable)

    monkeypatch.setattr(values.SyncOnReadVariable, "_get_cross_replica", counted_read)
    intervals = every_step(save=ctl.Every(steps=10), steps_per_loop=1)
    trainer = Counting(strategy=two_replicas, intervals=intervals, writers=[ctl.MemoryWriter()])
    trainer.train(4)
    trainer.evaluate()
    assert not reads
    saving = Counting(strategy=two_replicas, intervals=intervals, model_dir=str(tmp_path))
    saving.train(4)
    assert {id(variable) for variable in reads} == {
        id(v) for v in (saving.step_counts, *saving.listed, *saving.by_name.values())
    }
    assert saving.step_counts.numpy()[0] == 8
