"""A two-tower recommender. Names are hashed to rows of large tables; a step updates only a few rows.

python -m models.recommender --model_dir=/tmp/recommender --train_steps=2000
ctl launch --workers=1 --chief --ps=1 -- python -m models.recommender --model_dir=/tmp/recommender2

The data is synthetic: each of 5,000 users chose 12 of 2,000 items.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import tastes

ROWS = flags.DEFINE_integer("rows", 100_000, "Rows of each table, to which names are hashed.")
WIDTH = flags.DEFINE_integer("width", 16, "Numbers per row.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Step size of Adagrad.")
TOP = flags.DEFINE_integer("top", 10, "Length of the list that is judged.", lower_bound=1)

layers = keras.layers


class Tower(layers.Layer):
    """Embedding of names, strings `[...]`, as unit vectors `[..., width]`."""

    def __init__(self, rows, width, **options):
        super().__init__(**options)
        self.rows = rows
        self.table = layers.Embedding(rows, width)
        self.hidden = layers.Dense(4 * width, activation="relu")
        self.vector = layers.Dense(width)
        self.norm = layers.UnitNormalization()

    def call(self, names):
        found = self.table(tf.strings.to_hash_bucket_fast(names, self.rows))
        return self.norm(found + self.vector(self.hidden(found)))


class TwoTowers(keras.Model):
    """Scores `[b, k]` of items `[b, k]` for users `[b]`."""

    def __init__(self, rows, width, **options):
        super().__init__(**options)
        self.rows, self.width = rows, width
        self.users, self.items = Tower(rows, width, name="users"), Tower(rows, width, name="items")

    def call(self, names):
        users, items = names
        return 8.0 * tf.einsum("bw,biw->bi", self.users(users), self.items(items))

    def get_config(self):
        return {**super().get_config(), "rows": self.rows, "width": self.width}


class Recommender(ctl.Trainer):
    """A model that ranks the item a user chose above other items.

    A batch has strings: "user" `[b]`, "item" `[b]` and "others" `[b, k]`.
    """

    def __init__(
        self, config=None, *, rows=100_000, width=16, learning_rate=0.1, top=10, **options
    ):  # fmt: skip
        super().__init__(config, **options)
        self.rows, self.width, self.rate, self.top = rows, width, learning_rate, top
        self.arrays = tastes.load()

    def build(self):
        self.model = TwoTowers(self.rows, self.width)
        self.model((tf.constant(["somebody"]), tf.constant([["something"]])))
        self.optimizer = keras.optimizers.Adagrad(self.rate, initial_accumulator_value=1e-3)

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def scores(self, batch):
        """Returns scores `[b, 1 + k]`, of the chosen item first."""
        items = tf.concat([batch["item"][:, None], batch["others"]], axis=1)
        return self.model((batch["user"], items))

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.scores(batch)
            labels = tf.zeros(tf.shape(scores)[:1], tf.int32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}

    def eval_step(self, batch):
        scores = self.scores(batch)
        better = tf.reduce_sum(tf.cast(scores[:, 1:] >= scores[:, :1], tf.float32), axis=1)
        is_hit = tf.cast(better < self.top, tf.float32)
        gain = tf.math.log(2.0) / tf.math.log(better + 2.0)
        return {f"hit_rate_{self.top}": is_hit, f"ndcg_{self.top}": is_hit * gain}

    def signatures(self):
        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.string, name="user"),
                tf.TensorSpec([None, None], tf.string, name="items"),
            ]
        )
        def rank(user, items):
            order = tf.argsort(self.model((user, items)), axis=1, direction="DESCENDING")
            return {"items": tf.gather(items, order, batch_dims=1)}

        return {"serving_default": rank}


if __name__ == "__main__":
    ctl.run(Recommender, rows=ROWS, width=WIDTH, learning_rate=LEARNING_RATE, top=TOP)
