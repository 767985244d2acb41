"""AutoGraph conversion of the user's functions in all loops. Functions of ctl are not converted."""

import ctl
import pytest
import tensorflow as tf
from conftest import some_of
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
    def __init__(self, mode, **options):
        self.mode = mode
        super().__init__(**{"strategy": "default", "steps_per_loop": 2, "writers": [], **options})

    def build(self):
        super().build()
        if self.mode == "parts":
            self.gradients = ctl.Gradients(accumulate_steps=2)

    def train_data(self, batch_size):
        if self.mode == "program":
            return ctl.from_arrays(examples(), batch_size).map(branch_of_data)
        batches = tf.data.Dataset.from_tensor_slices(examples()).batch(batch_size)
        return batches.filter(lambda *_: True) if self.mode == "until the end" else batches.repeat()

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
def converted_files(monkeypatch):
    """Returns the list of files with functions that AutoGraph converts."""
    converted_files, convert = [], api._convert_actual

    def record_conversion(entity, context):
        converted_files.append(entity.__code__.co_filename)
        return convert(entity, context)

    monkeypatch.setattr(api, "_convert_actual", record_conversion)
    return converted_files


@pytest.mark.parametrize("mode", some_of(KINDS, "a loop", "parts", "two replicas"))
def test_a_branch_on_a_tensor_becomes_part_of_the_graph_and_ctl_is_not_converted(mode, converted_files):
    trainer = WithBranch(mode, **KINDS[mode])
    results = trainer.train(2)
    assert results["branch"] == 1.0
    assert __file__ in converted_files
    ctl_files = [name for name in converted_files if "/ctl/" in name]
    assert not ctl_files


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_selection_of_a_worker_s_rows_is_not_converted(num_replicas, converted_files, monkeypatch):
    monkeypatch.setattr(pipeline, "from_replica_batches", lambda make, *_: make(1, num_replicas))
    topology = Topology({"worker": ("a:1", "b:1", "c:1")}, num_replicas=3)
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(12)
    worker_batches = pipeline._iterator(batches, tf.distribute.get_strategy(), topology)
    rows, real_rows = next(iter(worker_batches))
    assert rows[0].shape == [4, 8] and real_rows == 4
    assert not converted_files
