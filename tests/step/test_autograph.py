"""AutoGraph converts the user's functions, in every kind of loop, and none of ours."""

import ctl
import pytest
import tensorflow as tf
from ctl.data import pipeline
from ctl.distribute.topology import Topology
from small_models import Small, every_step, examples
from tensorflow.python.autograph.impl import api

KINDS = {
    "one step": {"intervals": every_step()},
    "a loop": {},
    "until the end": {},
    "parts": {},
    "compiled": {"jit_compile": "step"},
    "program": {"jit_compile": "loop"},
    "two replicas": {"strategy": "mirrored", "num_virtual_devices": 2},
}


class WithBranch(Small):
    def __init__(self, how, **options):
        self.how = how
        super().__init__(**{"strategy": "default", "steps_per_loop": 2, "writers": [], **options})

    def build(self):
        super().build()
        if self.how == "parts":
            self.gradients = ctl.Gradients(accumulate_steps=2)

    def train_data(self, batch_size):
        if self.how == "program":
            return ctl.from_arrays(examples(), batch_size).map(branch_of_data)
        batches = tf.data.Dataset.from_tensor_slices(examples()).batch(batch_size)
        return batches.filter(lambda *_: True) if self.how == "until the end" else batches.repeat()

    def train_step(self, batch):
        scores = super().train_step(batch)
        branch = tf.constant(0.0)
        if tf.reduce_sum(scores["loss"]) >= 0.0:
            branch = tf.constant(1.0)
        return {**scores, "branch": branch}


def branch_of_data(x, y):
    if tf.size(y) > 0:
        y = tf.identity(y)
    return x, y


@pytest.fixture
def converted(monkeypatch):
    """The files of what AutoGraph converts."""
    found, convert = [], api._convert_actual

    def noted(entity, context):
        found.append(entity.__code__.co_filename)
        return convert(entity, context)

    monkeypatch.setattr(api, "_convert_actual", noted)
    return found


@pytest.mark.parametrize("how", KINDS)
def test_a_branch_on_a_tensor_is_one_of_the_graph_and_our_code_stays_as_it_is(how, converted):
    trainer = WithBranch(how, **KINDS[how])
    results = trainer.train(2)
    assert results["branch"] == 1.0
    assert __file__ in converted
    ours = [name for name in converted if "/ctl/" in name]
    assert not ours


@pytest.mark.parametrize("count", [1, 2])
def test_nor_is_what_gives_a_worker_its_rows_converted(count, converted, monkeypatch):
    monkeypatch.setattr(pipeline, "from_replica_batches", lambda batches_of, *_: batches_of(1, count))
    topology = Topology({"worker": ("a:1", "b:1", "c:1")}, num_replicas=3)
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(12)
    shares = pipeline._iterator(batches, tf.distribute.get_strategy(), topology)
    rows, real_rows = next(iter(shares))
    assert rows[0].shape == [4, 8] and real_rows == 4
    assert not converted
