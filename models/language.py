"""A language model: a decoder-only transformer that learns to write on, byte by byte.

python -m models.language --model_dir=/tmp/language --train_steps=2000
python -m models.language --model_dir=/tmp/language --mode=predict --prompt="Call me "
ctl launch --workers=2 -- python -m models.language --model_dir=/tmp/language2 --train_steps=2000
"""

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import flags

from models.data import text

DATA = flags.DEFINE_string("data", "shipped", text.HELP)
CONTEXT = flags.DEFINE_integer("context", 96, "Bytes that the model sees.", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", 3, "Number of blocks.", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 96, "Numbers per byte; a multiple of --heads.", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "Attention heads of a block.", lower_bound=1)
DROPOUT = flags.DEFINE_float("dropout", 0.0, "Share of a block's output to drop. 0 turns it off.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Step size of AdamW, after the warm-up.")
WARMUP_STEPS = flags.DEFINE_integer("warmup_steps", 100, "Steps until the full learning rate.")
DECAY_STEPS = flags.DEFINE_integer("decay_steps", 0, "Steps of warm-up and cosine. 0: --train_steps.")
WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.1, "Of AdamW, for matrices. 0 turns it off.")
CLIP_NORM = flags.DEFINE_float("clip_norm", 1.0, "Largest norm of the gradient. 0 turns it off.")
ACCUMULATE = flags.DEFINE_integer("accumulate_steps", 1, "Parts of a batch, to save memory.")
EMA = flags.DEFINE_float("ema", 0.99, "Momentum of the weights' average. 0 turns it off.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "What layers compute in.")
PROMPTS = flags.DEFINE_multi_string("prompt", ["The whale", "I "], "A beginning to write on.")
LENGTH = flags.DEFINE_integer("length", 200, "Bytes to write.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Below 1: likelier bytes. 0: the likeliest.")
SHOW_EVERY = flags.DEFINE_integer("show_every_steps", 200, "Steps between texts. 0 turns it off.")

BYTES = 256
layers = keras.layers


class Block(layers.Layer):
    """Attention to earlier places, then two dense layers; each adds to its input `[b, t, width]`."""

    def __init__(self, width, heads, dropout, **options):
        super().__init__(**options)
        self.options, policy = {"width": width, "heads": heads, "dropout": dropout}, self.dtype_policy
        self.norms = [layers.LayerNormalization(dtype=policy) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads, dtype=policy)
        self.wide = layers.Dense(4 * width, activation="gelu", dtype=policy)
        self.narrow = layers.Dense(width, dtype=policy)
        self.drop = layers.Dropout(dropout, dtype=policy)

    def call(self, x, training=None):
        y = self.norms[0](x)
        x += self.drop(self.attention(y, y, use_causal_mask=True), training=training)
        return x + self.drop(self.narrow(self.wide(self.norms[1](x))), training=training)

    def get_config(self):
        return {**super().get_config(), **self.options}


class Language(ctl.Trainer):
    """Rows are consecutive bytes `[b, context + 1]`; each is predicted from those before it."""

    def __init__(
        self, config=None, *, data="shipped", context=96, layers=3, width=96, heads=4, dropout=0.0,
        learning_rate=3e-3, warmup_steps=100, decay_steps=0, weight_decay=0.1, clip_norm=1.0,
        accumulate_steps=1, ema=0.99, dtype="float32", prompts=("The whale", "I "), length=200,
        temperature=0.7, show_every_steps=200, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        if width % heads:
            raise ctl.UsageError(f"--width is {width}; expected a multiple of --heads={heads}.")
        if not 0 <= ema < 1:
            raise ctl.UsageError(f"--ema is {ema}; expected 0 (off), or a number below 1 like 0.99.")
        self.rows, self.context = text.load(data, context), context
        self.shape = {"layers": layers, "width": width, "heads": heads, "dropout": dropout}
        self.policy = "mixed_bfloat16" if dtype == "bfloat16" else "float32"
        self.rate, self.warmup_steps = learning_rate, warmup_steps
        self.decay_steps = decay_steps or self.config.train_steps
        self.weight_decay, self.ema = weight_decay, ema
        self.prompts, self.length, self.temperature = prompts, length, temperature
        self.show_every_steps = show_every_steps
        self.gradients = ctl.Gradients(clip_norm=clip_norm or None, accumulate_steps=accumulate_steps)

    def build(self):
        width, policy = self.shape["width"], self.policy
        seen = keras.Input((self.context,), dtype="int32")
        places = layers.Embedding(self.context, width, dtype=policy)(tf.range(self.context)[None])
        x = layers.Embedding(BYTES, width, dtype=policy)(seen) + places
        for _ in range(self.shape["layers"]):
            x = Block(width, self.shape["heads"], self.shape["dropout"], dtype=policy)(x)
        x = layers.LayerNormalization(dtype=policy)(x)
        self.model = keras.Model(seen, layers.Dense(BYTES, dtype="float32")(x))
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, max(1, self.decay_steps - self.warmup_steps), alpha=0.1,
            warmup_target=self.rate, warmup_steps=self.warmup_steps,
        )  # fmt: skip
        average = {"use_ema": True, "ema_momentum": self.ema} if self.ema else {}
        self.optimizer = keras.optimizers.AdamW(rate, weight_decay=self.weight_decay, **average)
        self.optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])

    def train_data(self, batch_size):
        return ctl.from_arrays(self.rows["train"], batch_size)

    def eval_data(self, batch_size):
        return ctl.from_arrays(self.rows["test"], batch_size)

    def score(self, rows, training):
        rows = tf.cast(rows, tf.int32)
        logits, wanted = self.model(rows[:, :-1], training=training), rows[:, 1:]
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, logits)
        right = tf.equal(tf.argmax(logits, axis=2, output_type=tf.int32), wanted)
        return {
            "loss": tf.reduce_mean(loss, axis=1),
            "accuracy": tf.reduce_mean(tf.cast(right, tf.float32), axis=1),
            "bits_per_byte": tf.reduce_mean(loss, axis=1) / np.log(2.0),
        }

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        return self.score(batch, training=False)

    def after_loop(self, step, means):
        if self.show_every_steps and step % self.show_every_steps == 0:
            self.log("text", "\n\n".join(f"    {t!r}" for t in self.texts()))

    def texts(self):
        """What the model makes of each prompt."""
        found = self.generate(tf.constant(list(self.prompts)), self.length, self.temperature)
        return [one.decode(errors="replace") for one in found.numpy()]

    def predict(self):
        for prompt, found in zip(self.prompts, self.texts(), strict=True):
            yield {"prompt": prompt, "text": found}

    def signatures(self):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="prompts")])
        def generate(prompts):
            return {"texts": self.generate(prompts, self.length, self.temperature)}

        return {"serving_default": generate}

    def generate(self, prompts, length, temperature):
        """Strings `[n]` -> strings `[n]`: the prompts with `length` bytes more."""
        return tf.map_fn(lambda prompt: self.written(prompt, length, temperature), prompts)

    @tf.function(reduce_retracing=True)
    def written(self, prompt, length, temperature):
        """One prompt, a string `[]`, and what follows. The model sees its last `context` bytes."""
        known = tf.cast(tf.io.decode_raw(tf.strings.join(["\n", prompt]), tf.uint8), tf.int32)
        known = known[-self.context :]
        count = tf.size(known)
        window = tf.pad(known, [[0, self.context - count]])
        new = tf.TensorArray(tf.int32, length)
        for i in tf.range(length):
            logits = self.model(window[None], training=False)[0, count - 1]
            chosen = tf.argmax(logits, output_type=tf.int32)
            if temperature > 0:
                scaled = logits[None] / temperature
                chosen = tf.random.stateless_categorical(scaled, 1, [i, self.seed], tf.int32)[0, 0]
            new = new.write(i, chosen)
            if count == self.context:
                window = tf.roll(window, -1, axis=0)
                count -= 1
            window = tf.tensor_scatter_nd_update(window, [[count]], [chosen])
            count += 1
        letters = tf.gather(tf.constant([bytes([i]) for i in range(BYTES)]), new.stack())
        return tf.strings.join([prompt, tf.strings.reduce_join(letters)])


def main():
    settings = {
        "data": DATA, "context": CONTEXT, "layers": LAYERS, "width": WIDTH, "heads": HEADS,
        "dropout": DROPOUT, "learning_rate": LEARNING_RATE, "warmup_steps": WARMUP_STEPS,
        "decay_steps": DECAY_STEPS, "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM,
        "accumulate_steps": ACCUMULATE, "ema": EMA, "dtype": DTYPE, "prompts": PROMPTS,
        "length": LENGTH, "temperature": TEMPERATURE, "show_every_steps": SHOW_EVERY,
    }  # fmt: skip
    ctl.run(Language, **settings)


if __name__ == "__main__":
    main()
