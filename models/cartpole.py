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

LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-2, "Learning rate of Adam.")
GAME_STEPS = flags.DEFINE_integer("game_steps", 200, "Length of an episode (moves).", lower_bound=1)
DISCOUNT = flags.DEFINE_float("discount", 0.99, "Discount factor of rewards, per move.")

GRAVITY, CART_MASS, POLE_MASS = 9.8, 1.0, 0.1  # m/s^2, kg, kg
TOTAL_MASS, POLE_HALF_LENGTH = CART_MASS + POLE_MASS, 0.5  # kg, m
FORCE, MOVE_SECS = 10.0, 0.02  # N, s
MAX_POSITION, MAX_ANGLE = 2.4, 0.2095  # m, rad


def next_state(state, push_right):
    """Returns the states `[b, 4]` after one move of 20 ms.

    Args:
      state: Position (m), velocity (m/s), angle (rad) and angular velocity (rad/s), `[b, 4]`.
      push_right: True for a push to the right, False for a push to the left, bool `[b]`.
    """
    _, velocity, angle, angular_velocity = tf.unstack(state, axis=1)
    cos, sin = tf.cos(angle), tf.sin(angle)
    force = tf.where(push_right, FORCE, -FORCE)
    pole_moment = POLE_MASS * POLE_HALF_LENGTH
    mean_acceleration = (force + pole_moment * angular_velocity**2 * sin) / TOTAL_MASS
    angular_acceleration = (GRAVITY * sin - cos * mean_acceleration) / (
        POLE_HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / TOTAL_MASS)
    )
    acceleration = mean_acceleration - pole_moment * angular_acceleration * cos / TOTAL_MASS
    derivatives = [velocity, acceleration, angular_velocity, angular_acceleration]
    return state + MOVE_SECS * tf.stack(derivatives, axis=1)


def is_upright(state):
    """Returns True where the cart is on the track and the pole has not fallen, bool `[b]`."""
    return (tf.abs(state[:, 0]) <= MAX_POSITION) & (tf.abs(state[:, 2]) <= MAX_ANGLE)


class CartPole(ctl.Trainer):
    """A policy. A step plays one game per example, with the number of the example as seed."""

    def __init__(
        self, config=None, *, learning_rate=1e-2, game_steps=200, discount=0.99, **options
    ):
        super().__init__(config, **options)
        self.learning_rate, self.game_steps, self.discount = learning_rate, game_steps, discount

    def build(self):
        """Creates the policy network."""
        self.model = keras.Sequential([
            keras.Input((4,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(1, dtype="float32"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.learning_rate)

    def train_data(self, batch_size):
        """Returns batches of game numbers."""
        return ctl.example_numbers(batch_size)

    def play(self, games):
        """Returns states `[t, b, 4]`, bool moves to the right `[t, b]` and bool games not lost `[t, b]`.

        Args:
          games: Numbers of the games, `[b]`.
        """
        seeds = tf.stack([games, tf.fill(tf.shape(games), tf.cast(self.seed, tf.int64))], axis=1)
        uniform = tf.map_fn(
            lambda seed: tf.random.stateless_uniform([self.game_steps + 4], seed), seeds,
            fn_output_signature=tf.float32,
        )  # fmt: skip
        state, is_alive = (uniform[:, :4] - 0.5) * 0.1, tf.fill(tf.shape(games), True)
        states = tf.TensorArray(tf.float32, self.game_steps)
        moves = tf.TensorArray(tf.bool, self.game_steps)
        alive = tf.TensorArray(tf.bool, self.game_steps)
        for t in tf.range(self.game_steps):
            push_right = uniform[:, 4 + t] < tf.sigmoid(self.model(state)[:, 0])
            states, moves = states.write(t, state), moves.write(t, push_right)
            alive = alive.write(t, is_alive)
            state = next_state(state, push_right)
            is_alive &= is_upright(state)
        return states.stack(), moves.stack(), alive.stack()

    def train_step(self, games):
        """Plays games and updates the policy."""
        states, moves, alive = self.play(games)
        lengths = tf.reduce_sum(tf.cast(alive, tf.float32), axis=0)
        remaining = lengths - tf.range(self.game_steps, dtype=tf.float32)[:, None]
        returns = (1 - self.discount ** tf.maximum(remaining, 0)) / (1 - self.discount)
        baseline = (1 - self.discount ** (lengths / 2)) / (1 - self.discount)
        with tf.GradientTape() as tape:
            logits = tf.reshape(self.model(tf.reshape(states, [-1, 4])), tf.shape(moves))
            negative_log_likelihood = tf.nn.sigmoid_cross_entropy_with_logits(
                tf.cast(moves, tf.float32), logits
            )
            losses = negative_log_likelihood * (returns - baseline) / self.game_steps
            loss = self.average(losses, mask=alive)
        self.minimize(loss, tape)
        return {"game_length": lengths}


if __name__ == "__main__":
    ctl.run(CartPole, learning_rate=LEARNING_RATE, game_steps=GAME_STEPS, discount=DISCOUNT)
