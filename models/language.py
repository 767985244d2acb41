"""A byte-level language model: a decoder-only transformer that continues a text.

python -m models.language --model_dir=/tmp/language --train_steps=2000
python -m models.language --model_dir=/tmp/language --mode=predict --prompt="Call me "
ctl launch --workers=2 -- python -m models.language --model_dir=/tmp/language2 --train_steps=2000
"""

from types import SimpleNamespace

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
PROMPT = flags.DEFINE_multi_string("prompt", ["The whale", "I "], "A beginning to write on.")
LENGTH = flags.DEFINE_integer("length", 200, "Bytes to write.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Below 1: likelier bytes. 0: the likeliest.")
SHOW_EVERY = flags.DEFINE_integer("show_every_steps", 200, "Steps between texts. 0 turns it off.")

SETTINGS = (
    DATA, CONTEXT, LAYERS, WIDTH, HEADS, DROPOUT, LEARNING_RATE, WARMUP_STEPS, DECAY_STEPS, WEIGHT_DECAY,
    CLIP_NORM, ACCUMULATE, EMA, DTYPE, PROMPT, LENGTH, TEMPERATURE, SHOW_EVERY,
)  # fmt: skip
BYTES = 256
DEFAULTS = {flag.name: flag.default for flag in SETTINGS}
layers = keras.layers


class Block(layers.Layer):
    """Transformer block: causal attention and two dense layers, each added to its input `[b, t, width]`."""

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
    """A model that predicts each byte of a row from the previous bytes. Rows are `[b, context + 1]`."""

    def __init__(self, config=None, **settings):
        """Accepts the flags above as keywords, e.g. `context=128`, and the keywords of ctl.Trainer."""
        own = {name: settings.pop(name, default) for name, default in DEFAULTS.items()}
        super().__init__(config, **settings)
        if own["width"] % own["heads"]:
            raise ctl.UsageError(
                f"--width is {own['width']}; expected a multiple of --heads={own['heads']}."
            )
        if not 0 <= own["ema"] < 1:
            raise ctl.UsageError(f"--ema is {own['ema']}; expected 0 (off), or a number below 1 like 0.99.")
        self.own = SimpleNamespace(**own)
        self.rows, self.context = text.load(own["data"], own["context"]), own["context"]
        self.gradients = ctl.Gradients(
            clip_norm=own["clip_norm"] or None, accumulate_steps=own["accumulate_steps"]
        )

    def build(self):
        own, width = self.own, self.own.width
        policy = "mixed_bfloat16" if own.dtype == "bfloat16" else "float32"
        seen = keras.Input((self.context,), dtype="int32")
        places = layers.Embedding(self.context, width, dtype=policy)(tf.range(self.context)[None])
        x = layers.Embedding(BYTES, width, dtype=policy)(seen) + places
        for _ in range(own.layers):
            x = Block(width, own.heads, own.dropout, dtype=policy)(x)
        x = layers.LayerNormalization(dtype=policy)(x)
        self.model = keras.Model(seen, layers.Dense(BYTES, dtype="float32")(x))
        steps = own.decay_steps or self.config.train_steps
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, max(1, steps - own.warmup_steps), alpha=0.1,
            warmup_target=own.learning_rate, warmup_steps=own.warmup_steps,
        )  # fmt: skip
        average = {"use_ema": True, "ema_momentum": own.ema} if own.ema else {}
        self.optimizer = keras.optimizers.AdamW(rate, weight_decay=own.weight_decay, **average)
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
        if self.own.show_every_steps and step % self.own.show_every_steps == 0:
            self.log("text", "\n\n".join(f"    {t!r}" for t in self.texts()))

    def texts(self):
        """Returns a list with the continued text of each prompt of the flag --prompt."""
        prompts = tf.constant(list(self.own.prompt))
        found = self.generate(prompts, self.own.length, self.own.temperature)
        return [one.decode(errors="replace") for one in found.numpy()]

    def predict(self):
        for prompt, found in zip(self.own.prompt, self.texts(), strict=True):
            yield {"prompt": prompt, "text": found}

    def signatures(self):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="prompts")])
        def generate(prompts):
            return {"texts": self.generate(prompts, self.own.length, self.own.temperature)}

        return {"serving_default": generate}

    def generate(self, prompts, length, temperature):
        """Returns the prompts, strings `[n]`, each continued by `length` bytes."""
        return tf.map_fn(lambda prompt: self.written(prompt, length, temperature), prompts)

    @tf.function(reduce_retracing=True)
    def written(self, prompt, length, temperature):
        """Returns one prompt, a string `[]`, continued by `length` bytes.

        The model predicts each byte from the last `context` bytes.
        """
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


if __name__ == "__main__":
    ctl.run(Language, **{flag.name: flag for flag in SETTINGS})
