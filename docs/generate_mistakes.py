"""Makes the mistakes of docs/mistakes.md and writes the messages into the page.

    python docs/generate_mistakes.py            # writes; tests/test_docs_mistakes.py compares
"""

import contextlib
import io
import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
PAGE = Path(__file__).with_name("mistakes.md")
HEAD = """# Common mistakes

<!-- Written by `python docs/generate_mistakes.py`; a test compares. Do not edit by hand. -->

Mistakes and their errors: a `UsageError` before the first step where possible, and exit code 2 in programs
that end with `ctl.run`. All start from this trainer:

"""
BASE = """
import ctl
import keras
import numpy as np
import tensorflow as tf

x, y = np.ones([64, 4], np.float32), np.zeros([64], np.int64)


class Small(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        return ctl.from_arrays((x, y), batch_size)

    def losses(self, batch):
        logits = self.model(batch[0], training=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.losses(batch)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}


options = {"global_batch_size": 16, "writers": []}
two = {"strategy": "mirrored", "devices": "cpu:0,cpu:1"}
"""
# (title, what happens elsewhere, code that ends in the mistake)
MISTAKES = [
    (
        "The mean of a replica as the loss",
        "Gradients are added up over replicas: the learning rate grows with them.",
        """
class Wrong(Small):
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.losses(batch))
        self.minimize(loss, tape)

Wrong(**two, **options).train(1)
""",
    ),
    (
        "Labels [b, 1] and predictions [b]",
        "Broadcast to [b, b], they make the model learn the mean of all labels.",
        """
class Wrong(Small):
    def losses(self, batch):
        predicted = self.model(batch[0], training=True)[:, 0]
        return (predicted - tf.cast(batch[1], tf.float32)[:, None]) ** 2

Wrong(**options).train(1)
""",
    ),
    (
        "A model made outside build",
        "Its variables belong to no strategy, or are not saved.",
        """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

class Wrong(Small):
    def build(self):
        super().build()
        self.model = model

Wrong(**two, **options).train(1)
""",
    ),
    (
        "A misspelt setting",
        "It would be ignored.",
        """
Small(global_batchsize=32)
""",
    ),
    (
        "Data that is not in batches",
        "Each number of an example would look like an example.",
        """
class Wrong(Small):
    def train_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat()

Wrong(**two, **options).train(1)
""",
    ),
    (
        "Batches of another size than the global batch",
        "The mean is divided by a wrong number of examples.",
        """
class Wrong(Small):
    def train_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(2 * batch_size)

Wrong(**options).train(1)
""",
    ),
    (
        "Arrays of unequal length",
        "",
        """
class Wrong(Small):
    def train_data(self, batch_size):
        return ctl.from_arrays((x, y[:-1]), batch_size)

Wrong(**options).train(1)
""",
    ),
    (
        "Evaluation data without an end",
        "The first evaluation never returns.",
        """
class Wrong(Small):
    def eval_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch_size)

    def eval_step(self, batch):
        return {"loss": self.losses(batch)}

Wrong(eval_every_steps=10, **options).train(1)
""",
    ),
    (
        "Evaluations without eval_step",
        "",
        """
Small(eval_every_steps=10, **options).train(1)
""",
    ),
    (
        "A loss that is not finite",
        "Weights become NaN, and so does every later checkpoint.",
        """
class Wrong(Small):
    def train_data(self, batch_size):
        return ctl.from_arrays((np.where(x > 0, np.inf, x), y), batch_size)

Wrong(**options).train(1)
""",
    ),
    (
        "Numbers of Python in a step",
        "A traced step has no values for `numpy()`.",
        """
class Wrong(Small):
    def train_step(self, batch):
        found = super().train_step(batch)
        print(found["loss"].numpy())
        return found

Wrong(**options).train(1)
""",
    ),
    (
        "A variable that the loss does not depend on",
        "Its gradient is None.",
        """
class Wrong(Small):
    def train_step(self, batch):
        losses = self.losses(batch)
        with tf.GradientTape() as tape:  # after the model was called
            loss = self.average(losses)
        self.minimize(loss, tape)

Wrong(**options).train(1)
""",
    ),
    (
        "Another model in the directory of a run",
        "Training would begin with noise.",
        """
Small(model_dir="runs/small", **options).train(1)

class Wider(Small):
    def build(self):
        super().build()
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

Wider(model_dir="runs/small", **options).train(2)
""",
    ),
    (
        "A checkpoint that is not there",
        "Training would begin anew.",
        """
Small(**options).restore("runs/nowhere")
""",
    ),
    (
        "A TF_CONFIG that cannot be",
        "TensorFlow waits for workers that never come.",
        """
import os

os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}'
Small(**options)
""",
    ),
]


def page() -> str:
    """The page, with the messages of this version."""
    import ctl

    names: dict[str, Any] = {"__name__": "mistakes"}
    exec(BASE, names)
    parts = [HEAD, f"```python\n{BASE.strip()}\n```\n"]
    for number, (title, elsewhere, code) in enumerate(MISTAKES, start=1):
        source = Path("mistake.py")
        source.write_text(code)
        variables = dict(os.environ)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(source.absolute()), "exec"), names)
        except (ctl.CtlError, Exception) as e:
            error_type, message = type(e).__name__, str(e)
        else:
            raise AssertionError(f"{title}: no error")
        finally:
            os.environ.clear()
            os.environ.update(variables)
        message = "\n".join(textwrap.fill(line, 118) for line in normalize(message).splitlines())
        happens = f"\n{elsewhere}\n" if elsewhere else ""
        blocks = f"```py\n{code.strip()}\n```\n\n```text\n{error_type}: {message}\n```\n"
        parts.append(f"\n## {number}. {title}\n{happens}\n{blocks}")
    return "".join(parts)


def normalize(text: str) -> str:
    """Returns a message without paths and addresses, which differ between machines."""
    text = re.sub(r"[^\s\"]*/(?=mistake\.py|runs/)", "", text.strip())
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def generate_page() -> str:
    """Returns the page. Its programs run in a temporary directory."""
    previous_directory = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return page()
        finally:
            os.chdir(previous_directory)


if __name__ == "__main__":
    import tensorflow

    cpu = tensorflow.config.list_physical_devices("CPU")[0]
    two_devices = [tensorflow.config.LogicalDeviceConfiguration()] * 2
    tensorflow.config.set_logical_device_configuration(cpu, two_devices)
    PAGE.write_text(generate_page())
