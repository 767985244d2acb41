"""A two-tower recommender. Names are hashed to rows of large tables; a step updates only a few rows.

python -m models.recommender --model_dir=/tmp/recommender --train_steps=2000
ctl launch --workers=1 --chief --ps=1 -- python -m models.recommender --model_dir=/tmp/recommender2

The data is synthetic: each of 5,000 users chose 12 of 2,000 items.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags
from keras import layers

from models.data import tastes

ROWS = flags.DEFINE_integer("rows", 100_000, "Rows of each embedding table; names are hashed to rows.")
WIDTH = flags.DEFINE_integer("width", 16, "Embedding size.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Learning rate of Adagrad.")
TOP = flags.DEFINE_integer("top", 10, "k of the hit rate and of NDCG.", lower_bound=1)


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
        """Returns the vectors."""
        embeddings = self.table(tf.strings.to_hash_bucket_fast(names, self.rows))
        return self.norm(embeddings + self.vector(self.hidden(embeddings)))


class TwoTowers(keras.Model):
    """Scores `[b, k]` of items `[b, k]` for users `[b]`."""

    def __init__(self, rows, width, **options):
        super().__init__(**options)
        self.rows, self.width = rows, width
        self.users, self.items = Tower(rows, width, name="users"), Tower(rows, width, name="items")

    def call(self, names):
        """Returns the scores."""
        users, items = names
        return 8.0 * tf.einsum("bw,biw->bi", self.users(users), self.items(items))

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "rows": self.rows, "width": self.width}


class Recommender(ctl.Trainer):
    """A model that ranks the item a user chose above other items.

    A batch has strings: "user" `[b]`, "item" `[b]` and "negatives" `[b, k]`.
    """

    def __init__(
        self, config=None, *, rows=100_000, width=16, learning_rate=0.1, top=10, **options
    ):  # fmt: skip
        super().__init__(config, **options)
        self.rows, self.width, self.learning_rate, self.top = rows, width, learning_rate, top
        self.arrays = tastes.load()

    def build(self):
        """Creates the towers and the optimizer."""
        self.model = TwoTowers(self.rows, self.width)
        self.model((tf.constant(["user"]), tf.constant([["item"]])))
        self.optimizer = keras.optimizers.Adagrad(self.learning_rate, initial_accumulator_value=1e-3)

    def train_data(self, batch_size):
        """Returns batches of training examples."""
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        """Returns batches of test examples."""
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def score_items(self, batch):
        """Returns scores `[b, 1 + k]`; the chosen item is the first."""
        items = tf.concat([batch["item"][:, None], batch["negatives"]], axis=1)
        return self.model((batch["user"], items))

    def train_step(self, batch):
        """Trains on one replica's part of the batch."""
        with tf.GradientTape() as tape:
            scores = self.score_items(batch)
            labels = tf.zeros(tf.shape(scores)[:1], tf.int32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}

    def eval_step(self, batch):
        """Ranks the chosen item among the other items."""
        scores = self.score_items(batch)
        rank = tf.reduce_sum(tf.cast(scores[:, 1:] >= scores[:, :1], tf.float32), axis=1)
        is_hit = tf.cast(rank < self.top, tf.float32)
        gain = tf.math.log(2.0) / tf.math.log(rank + 2.0)
        return {f"hit_rate_{self.top}": is_hit, f"ndcg_{self.top}": is_hit * gain}

    def signatures(self):
        """Returns the function that the SavedModel serves."""
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
