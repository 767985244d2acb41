"""AutoGraph converts the user's functions, in every kind of loop, and none of ours."""

import ctl
import pytest
import tensorflow as tf
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


@pytest.mark.parametrize("how", KINDS)
def test_a_branch_on_a_tensor_is_one_of_the_graph_and_our_code_stays_as_it_is(how, monkeypatch):
    converted, convert = [], api._convert_actual

    def noted(entity, context):
        converted.append(entity.__code__.co_filename)
        return convert(entity, context)

    monkeypatch.setattr(api, "_convert_actual", noted)
    trainer = WithBranch(how, **KINDS[how])
    results = trainer.train(2)
    assert results["branch"] == 1.0
    assert __file__ in converted
    ours = [name for name in converted if "/ctl/" in name]
    assert not ours
