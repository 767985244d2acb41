"""Policy gradients for the cart-pole problem. The step simulates its own games and needs no dataset.

python -m models.cartpole --model_dir=/tmp/cartpole --train_steps=200
ctl launch --workers=2 -- python -m models.cartpole --model_dir=/tmp/cartpole2 --train_steps=200

Dynamics: Barto, Sutton and Anderson 1983, doi:10.1109/TSMC.1983.6313077. Update: Williams 1992,
doi:10.1007/BF00992696.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-2, "Step size of Adam.")
GAME_STEPS = flags.DEFINE_integer(
    "game_steps", 200, "Moves after which a game is won.", lower_bound=1
)
DISCOUNT = flags.DEFINE_float("discount", 0.99, "What a reward one move later is worth.")

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MAX_POSITION, MAX_ANGLE = 2.4, 0.2095  # m, rad


def moved(state, right):
    """Returns the states `[b, 4]` after one move of 20 ms.

    Args:
      state: Position (m), speed (m/s), angle (rad) and angular speed (rad/s), `[b, 4]`.
      right: True for a push to the right, False for a push to the left, bool `[b]`.
    """
    x, speed, angle, turning = tf.unstack(state, axis=1)
    cos, sin = tf.cos(angle), tf.sin(angle)
    push = (tf.where(right, FORCE, -FORCE) + POLE * HALF_LENGTH * turning**2 * sin) / (CART + POLE)
    bend = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / (CART + POLE)))
    drive = push - POLE * HALF_LENGTH * bend * cos / (CART + POLE)
    new = [x + SECS * speed, speed + SECS * drive, angle + SECS * turning, turning + SECS * bend]
    return tf.stack(new, axis=1)


def stands(state):
    return (tf.abs(state[:, 0]) <= MAX_POSITION) & (tf.abs(state[:, 2]) <= MAX_ANGLE)


class CartPole(ctl.Trainer):
    """A policy. A step plays one game per example, with the number of the example as seed."""

    def __init__(
        self, config=None, *, learning_rate=1e-2, game_steps=200, discount=0.99, **options
    ):
        super().__init__(config, **options)
        self.learning_rate, self.game_steps, self.discount = learning_rate, game_steps, discount

    def build(self):
        self.model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.learning_rate)

    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)

    def played(self, games):
        """Returns states `[t, b, 4]`, bool moves to the right `[t, b]` and bool games not lost `[t, b]`.

        Args:
          games: Numbers of the games, `[b]`.
        """
        seeds = tf.stack([games, tf.fill(tf.shape(games), tf.cast(self.seed, tf.int64))], axis=1)
        uniform = tf.map_fn(
            lambda s: tf.random.stateless_uniform([self.game_steps + 4], s), seeds,
            fn_output_signature=tf.float32,
        )  # fmt: skip
        state, alive = (uniform[:, :4] - 0.5) * 0.1, tf.fill(tf.shape(games), True)
        states = tf.TensorArray(tf.float32, self.game_steps)
        rights, lives = (
            tf.TensorArray(tf.bool, self.game_steps),
            tf.TensorArray(tf.bool, self.game_steps),
        )
        for t in tf.range(self.game_steps):
            right = uniform[:, 4 + t] < tf.sigmoid(self.model(state)[:, 0])
            states, rights = states.write(t, state), rights.write(t, right)
            lives = lives.write(t, alive)
            state = moved(state, right)
            alive &= stands(state)
        return states.stack(), rights.stack(), lives.stack()

    def train_step(self, games):
        states, rights, alive = self.played(games)
        lengths = tf.reduce_sum(tf.cast(alive, tf.float32), axis=0)
        left = lengths - tf.range(self.game_steps, dtype=tf.float32)[:, None]  # remaining moves
        returns = (1 - self.discount ** tf.maximum(left, 0)) / (1 - self.discount)
        baseline = (1 - self.discount ** (lengths / 2)) / (1 - self.discount)
        with tf.GradientTape() as tape:
            logits = tf.reshape(self.model(tf.reshape(states, [-1, 4])), tf.shape(rights))
            surprise = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(rights, tf.float32), logits)
            loss = self.average(surprise * (returns - baseline) / self.game_steps, mask=alive)
        self.minimize(loss, tape)
        return {"game_length": lengths}


if __name__ == "__main__":
    ctl.run(CartPole, learning_rate=LEARNING_RATE, game_steps=GAME_STEPS, discount=DISCOUNT)
