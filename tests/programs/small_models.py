"""Small trainers with identical results in Keras 3, tf_keras and a plain tf.Module."""

import ctl
import keras
import numpy as np
import tensorflow as tf
import tf_keras

FEATURES, HIDDEN, CLASSES, EXAMPLES, BATCH = 8, 16, 4, 96, 24


def examples(seed: int = 0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return x, generator.integers(0, CLASSES, EXAMPLES).astype(np.int64)


def initial_weights() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [generator.normal(size=s, scale=0.3).astype(np.float32) for s in shapes]


class PlainModel(tf.Module):
    def __init__(self):
        super().__init__()
        self.layers = [tf.Variable(w, name=f"w{i}") for i, w in enumerate(initial_weights())]

    def __call__(self, x, training=False):
        w1, b1, w2, b2 = self.layers
        return tf.tanh(x @ w1 + b1) @ w2 + b2


class PlainOptimizer(tf.Module):
    """SGD, or Adam with slots that the first call of `build` creates."""

    def __init__(self, name: str):
        super().__init__()
        self.word, self.built = name, False

    def build(self, variables):
        self.count = tf.Variable(0.0, trainable=False)
        self.m = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self.v = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self.built = True

    def apply(self, gradients, variables):
        if self.word == "sgd":
            for g, x in zip(gradients, variables, strict=True):
                x.assign_sub(0.1 * g)
            return
        t = self.count.assign_add(1.0)
        rate = 1e-2 * tf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for g, x, m, v in zip(gradients, variables, self.m, self.v, strict=True):
            m_new = m.assign(0.9 * m + 0.1 * g)
            v_new = v.assign(0.999 * v + 0.001 * g * g)
            x.assign_sub(rate * m_new / (tf.sqrt(v_new) + 1e-7))


class Small(ctl.Trainer):
    def __init__(self, framework="keras3", optimizer="sgd", dropout=0.0, tf_data=False, **options):
        options.setdefault("global_batch_size", BATCH)
        super().__init__(**options)
        self.framework, self.word, self.dropout, self.tf_data = (framework, optimizer, dropout, tf_data)

    def build(self):
        if self.framework == "module":
            self.model, self.optimizer = PlainModel(), PlainOptimizer(self.word)
            self.optimizer.build(self.model.trainable_variables)
            return
        lib = keras if self.framework == "keras3" else tf_keras
        self.model = lib.Sequential([
            keras.Input((FEATURES,)) if lib is keras else lib.layers.InputLayer((FEATURES,)),
            lib.layers.Dense(HIDDEN, activation="tanh"),
            *([lib.layers.Dropout(self.dropout)] if self.dropout else []),
            lib.layers.Dense(CLASSES),
        ])  # fmt: skip
        self.model.set_weights(initial_weights())
        self.optimizer = (
            lib.optimizers.SGD(0.1) if self.word == "sgd" else lib.optimizers.Adam(1e-2, epsilon=1e-7)
        )

    def train_data(self, batch_size):
        x, y = examples()
        if not self.tf_data:
            return ctl.from_arrays((x, y), batch_size)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.shuffle(EXAMPLES).repeat().batch(batch_size, drop_remainder=True)

    def eval_data(self, batch_size):
        x, y = examples(seed=5)
        return x[:13], y[:13]

    def score(self, batch, training):
        x, y = batch
        logits = self.model(x, training=training)
        return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)}

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    @tf.autograph.experimental.do_not_convert
    def eval_step(self, batch):
        return self.score(batch, training=False)


def every_step(**changes) -> ctl.Intervals:
    return ctl.Intervals(**{"log": ctl.Every(steps=1), "save": ctl.Every(), **changes})


def losses(writer: ctl.MemoryWriter) -> list[float]:
    return [values["loss"] for run, _, values in writer.rows if run == "train"]


def weights(trainer) -> list[np.ndarray]:
    from ctl.distribute.keras_objects import unwrap

    return [unwrap(v).numpy() for v in trainer.model.trainable_variables]


def digest(trainer) -> str:
    import hashlib

    return hashlib.sha256(b"".join(w.tobytes() for w in weights(trainer))).hexdigest()


def traced_steps(path):
    """Returns the numbers of the steps in a trace file, as the plugin reads them."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    steps = set()
    for plane in space.planes:
        for event in (e for line in plane.lines for e in line.events):
            stats = {plane.stat_metadata[s.metadata_id].name: s.int64_value for s in event.stats}
            assert "iter_num" not in stats, "iterations of a loop in the graph hide the steps"
            if plane.event_metadata[event.metadata_id].name == "train":
                steps.add(stats["step_num"])
    return steps
