"""The global seed: numbers as after `tf.random.set_seed`, without the loss of compiled kernels."""

import json

import patching
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import kernel_seeds
from ctl.tensorflow_patches.eager_context import global_seed
from tensorflow.python.data.util import random_seed as dataset_seed
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

PROGRAM = """
import json, sys
import ctl, keras, numpy as np, tensorflow as tf
from tensorflow.python.eager import context

clears, seen = [], []
clear = context.pywrap_tfe.TFE_ContextClearCaches
context.pywrap_tfe.TFE_ContextClearCaches = lambda handle: (clears.append(1), clear(handle))

class Small(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        x = np.ones([8, 2], np.float32)
        if sys.argv[1] == "random":
            x = tf.random.normal([8, 2]).numpy()
        seen.append(x.tolist())
        data = tf.data.Dataset.from_tensor_slices({"x": x, "y": x[:, :1]}).shuffle(8)
        return data.batch(batch_size, drop_remainder=True).repeat()

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.average(tf.square(self.model(batch["x"], training=True) - batch["y"])[:, 0])
        self.minimize(loss, tape)
        return {"loss": loss}

trainer, counts = Small(global_batch_size=4, steps_per_loop=2), []
for steps in (2, 4, 6):
    trainer.train(steps=steps)
    counts.append(len(clears))
print("RESULT", json.dumps({"counts": counts, "equal": seen[0] == seen[1] == seen[2], "num": len(seen)}))
"""


@pytest.fixture
def clears(monkeypatch):
    """A list with an element for each time that kernels are discarded."""
    tf.constant(0)  # initializes the context
    calls, clear = [], context.pywrap_tfe.TFE_ContextClearCaches

    def recorded(handle):
        calls.append(1)
        clear(handle)

    monkeypatch.setattr(context.pywrap_tfe, "TFE_ContextClearCaches", recorded)
    monkeypatch.setattr(kernel_seeds, "_has_random_operations", False)
    yield calls
    monkeypatch.undo()
    tf.random.set_seed(0)


def operation_seeds():
    return [context.context()._internal_operation_seed() for _ in range(3)]


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_the_seeds_of_operations_are_those_of_tensorflow(clears, seed):
    tf.random.set_seed(seed)
    expected = operation_seeds()
    clears.clear()
    kernel_seeds.set_seed(seed)
    assert operation_seeds() == expected and global_seed() == seed and not clears


def test_unseeded_shuffles_have_the_order_after_set_seed(clears):
    orders = []
    for set_seed in (tf.random.set_seed, kernel_seeds.set_seed, kernel_seeds.set_seed):
        set_seed(3)
        orders.append(list(tf.data.Dataset.range(50).shuffle(50).as_numpy_iterator()))
    assert orders[0] == orders[1] == orders[2] and len(clears) == 1


@pytest.mark.parametrize("op_seed", [None, 5])
def test_random_operations_begin_again(clears, op_seed):
    values = []
    for _ in range(3):
        kernel_seeds.set_seed(3)
        values.append(tf.random.uniform([4], seed=op_seed).numpy().tolist())
    assert values[0] == values[1] == values[2] and len(clears) == 2


def test_a_random_operation_in_a_graph_counts(clears):
    tf.function(lambda: tf.random.uniform([])).get_concrete_function()
    kernel_seeds.set_seed(3)
    assert len(clears) == 1


def test_kernels_are_discarded_without_the_patch(clears, monkeypatch):
    patching.turn_off(monkeypatch, "kernel_seeds")
    kernel_seeds.set_seed(3)
    assert len(clears) == 1


def test_the_functions_of_tensorflow_exist():
    assert patching.parameters_of(random_seed.get_seed) == ["op_seed"]
    assert random_seed.get_seed.__wrapped__ is dataset_seed.random_seed.get_seed
    assert {"_seed", "_rng"} <= vars(context.context()).keys()


@pytest.mark.parametrize("kind", ["constant", "random"])
def test_further_calls_of_train_compile_nothing_without_random_operations(run_program, tmp_path, kind):
    script = tmp_path / "small.py"
    script.write_text(PROGRAM)
    (result,) = run_program(1, [str(script), kind], fresh=True)
    assert result.code == 0, result.output
    (line,) = [text for text in result.output.splitlines() if text.startswith("RESULT ")]
    facts = json.loads(line.removeprefix("RESULT "))
    first, second, third = facts["counts"]
    assert facts["equal"] and facts["num"] == 3
    assert first <= second <= third and (first == third) == (kind == "constant")
