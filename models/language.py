"""A byte-level language model: a decoder-only transformer that continues a text.

python -m models.language --model_dir=/tmp/language --train_steps=2000
python -m models.language --model_dir=/tmp/language --mode=predict --prompt="Call me "
ctl launch --workers=2 -- python -m models.language --model_dir=/tmp/language2 --train_steps=2000
"""

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import flags

from models import transformer
from models.data import text

FLAGS = (
    flags.DEFINE_string("data", "shipped", text.HELP),
    flags.DEFINE_integer("context", 96, "Context length (bytes).", lower_bound=1),
    flags.DEFINE_integer("layers", 3, "Number of transformer blocks.", lower_bound=1),
    flags.DEFINE_integer("width", 96, "Embedding size; a multiple of --heads.", lower_bound=1),
    flags.DEFINE_integer("heads", 4, "Number of attention heads per block.", lower_bound=1),
    flags.DEFINE_float("dropout", 0.0, "Dropout rate. 0: off."),
    flags.DEFINE_float("learning_rate", 3e-3, "Learning rate of AdamW after the warm-up."),
    flags.DEFINE_integer("warmup_steps", 100, "Steps of linear warm-up."),
    flags.DEFINE_integer("decay_steps", 0, "Steps of warm-up and cosine decay. 0: --train_steps."),
    flags.DEFINE_float("weight_decay", 0.1, "Weight decay of AdamW, for matrices only. 0: off."),
    flags.DEFINE_float("clip_norm", 1.0, "Largest global gradient norm. 0: no clipping."),
    flags.DEFINE_integer("accumulate_steps", 1, "Parts into which a batch is split, to save memory."),
    flags.DEFINE_float("ema", 0.99, "Decay of the moving average of the weights. 0: off."),
    flags.DEFINE_multi_string("prompt", ["The whale", "I "], "Prompt to continue; may be repeated."),
    flags.DEFINE_integer("length", 200, "Number of bytes to generate.", lower_bound=1),
    flags.DEFINE_float(
        "temperature", 0.7, "Sampling temperature. Values below 1 favour likely bytes; 0: greedy decoding."
    ),
    flags.DEFINE_integer(
        "show_every_steps", 200, "Steps between generated samples, a multiple of --log_every_steps. 0: off."
    ),
)


class Language(ctl.Trainer):
    """Prediction of each byte of a row from the previous bytes. Rows are uint8 `[b, context + 1]`."""

    def __init__(
        self, config=None, *, data="shipped", context=96, layers=3, width=96, heads=4, dropout=0.0,
        learning_rate=3e-3, warmup_steps=100, decay_steps=0, weight_decay=0.1, clip_norm=1.0,
        accumulate_steps=1, ema=0.99, prompt=("The whale", "I "), length=200,
        temperature=0.7, show_every_steps=200, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        if width % heads:
            raise ctl.UsageError(f"--width is {width}; expected a multiple of --heads={heads}.")
        if not 0 <= ema < 1:
            raise ctl.UsageError(f"--ema is {ema}; expected 0 (off), or a number below 1 like 0.99.")
        self.context, self.layers, self.width, self.heads = context, layers, width, heads
        self.dropout = dropout
        self.learning_rate, self.warmup_steps, self.decay_steps = learning_rate, warmup_steps, decay_steps
        self.weight_decay, self.ema = weight_decay, ema
        self.prompts, self.length, self.temperature = tuple(prompt), length, temperature
        self.show_every_steps = show_every_steps
        self.rows = text.load(data, context)
        self.gradients = ctl.Gradients(clip_norm=clip_norm or None, accumulate_steps=accumulate_steps)

    def build(self):
        """Creates the transformer and the optimizer."""
        self.model = transformer.build_transformer(
            self.context, self.layers, self.width, self.heads, self.dropout
        )
        decay_steps = self.decay_steps or self.config.train_steps
        learning_rate = keras.optimizers.schedules.CosineDecay(
            0.0, max(1, decay_steps - self.warmup_steps), alpha=0.1,
            warmup_target=self.learning_rate, warmup_steps=self.warmup_steps,
        )  # fmt: skip
        averaging = {"use_ema": True, "ema_momentum": self.ema} if self.ema else {}
        self.optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=self.weight_decay, **averaging)
        self.optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])

    def train_data(self, batch_size):
        """Returns batches of training rows."""
        return ctl.from_arrays(self.rows["train"], batch_size)

    def eval_data(self, batch_size):
        """Returns batches of test rows."""
        return ctl.from_arrays(self.rows["test"], batch_size)

    def score(self, rows, training):
        """Returns loss, accuracy and bits per byte of each row, `[b]`."""
        rows = tf.cast(rows, tf.int32)
        logits, targets = self.model(rows[:, :-1], training=training), rows[:, 1:]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        is_correct = tf.equal(tf.argmax(logits, axis=2, output_type=tf.int32), targets)
        return {
            "loss": tf.reduce_mean(losses, axis=1),
            "accuracy": tf.reduce_mean(tf.cast(is_correct, tf.float32), axis=1),
            "bits_per_byte": tf.reduce_mean(losses, axis=1) / np.log(2.0),
        }

    def train_step(self, batch):
        """Trains on one replica's part of the batch."""
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        """Evaluates one replica's part of the batch."""
        return self.score(batch, training=False)

    def after_loop(self, step, means):
        """Writes generated texts to TensorBoard."""
        if self.show_every_steps and step % self.show_every_steps == 0:
            self.log("text", "\n\n".join(f"    {sample!r}" for sample in self.sample_texts()))

    def sample_texts(self):
        """Returns the continued text of each prompt."""
        texts = self.generate(tf.constant(self.prompts), self.length, self.temperature)
        return [sample.decode(errors="replace") for sample in texts.numpy()]

    def predict(self):
        """Yields each prompt with its continuation."""
        for prompt, generated in zip(self.prompts, self.sample_texts(), strict=True):
            yield {"prompt": prompt, "text": generated}

    def signatures(self):
        """Returns the function that the SavedModel serves."""

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="prompts")])
        def generate(prompts):
            return {"texts": self.generate(prompts, self.length, self.temperature)}

        return {"serving_default": generate}

    def generate(self, prompts, length, temperature):
        """Returns the prompts, strings `[n]`, each continued by `length` bytes."""
        return tf.map_fn(lambda prompt: self.continue_text(prompt, length, temperature), prompts)

    @tf.function(reduce_retracing=True)
    def continue_text(self, prompt, length, temperature):
        """Returns one prompt, a string `[]`, continued by `length` bytes."""
        return transformer.continue_text(self.model, prompt, length, temperature, self.seed)


if __name__ == "__main__":
    ctl.run(Language, **{flag.name: flag for flag in FLAGS})
