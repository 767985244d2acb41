"""The example models: two optimizers at different rates, pictures, and a step without data."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl import testing
from example_models import import_model
from small_models import every_step
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

cartpole = import_model("cartpole")
CartPole, next_state, is_upright = cartpole.CartPole, cartpole.next_state, cartpole.is_upright
Gan = import_model("gan").Gan
Mnist = import_model("mnist").Mnist

SILENT = {"writers": [], "intervals": every_step(log=ctl.Every())}


@pytest.mark.slow
def test_the_gan_updates_its_two_networks_at_their_own_rates(two_replicas):
    for strategy in ("default", two_replicas):
        writer = ctl.MemoryWriter()
        trainer = Gan(strategy=strategy, global_batch_size=8, discriminator_every_steps=3,
                      writers=[writer], intervals=every_step())  # fmt: skip
        trainer.train(4)
        assert int(trainer.optimizer.iterations.numpy()) == 4
        assert int(trainer.discriminator_optimizer.iterations.numpy()) == 2  # at steps 1 and 4
        norms = [values["gradient_norm/discriminator_optimizer"] for _, _, values in writer.rows]
        assert [n == 0 or np.isnan(n) for n in norms] == [i % 3 != 0 for i in range(4)]


def test_the_gan_shows_its_pictures_in_tensorboard(tmp_path):
    trainer = Gan(strategy="default", global_batch_size=8, show_every_steps=2, model_dir=tmp_path,
                  intervals=every_step(steps_per_loop=1))  # fmt: skip
    trainer.train(4)
    pictures = [
        (event.step, value.tensor.string_val)
        for file in (tmp_path / "logs" / "train").glob("events*")
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value if value.tag == "generated"
    ]  # fmt: skip
    assert [step for step, _ in pictures] == [2, 4]
    width, height, png = pictures[-1][1]
    image = tf.io.decode_png(png).numpy()
    assert image.shape == (int(height), int(width), 1) == (6 * 28, 6 * 28, 1)
    expected = np.uint8(trainer.generate_samples()[1, :, :, 0] * 255 + 0.5)
    np.testing.assert_array_equal(image[:28, 28:56, 0], expected)


def test_mnist_has_the_same_numbers_on_two_replicas():
    testing.assert_same_on_replicas(Mnist, steps=2, global_batch_size=8)


@pytest.mark.parametrize(
    ("images", "message"),
    [(np.zeros([2, 28, 28]), r"shape \(2, 28, 28\)"),
     pytest.param(np.zeros([1, 4, 4, 2]), "c of 1, 3 or 4", marks=pytest.mark.slow)],
)  # fmt: skip
def test_an_array_that_is_no_picture_is_refused(images, message):
    class Shows(CartPole):
        def after_loop(self, step, means):
            self.show("odd", images)

    with pytest.raises(ctl.UsageError, match=message):
        Shows(strategy="default", global_batch_size=2, game_steps=2,
              writers=[ctl.MemoryWriter()], intervals=every_step()).train(1)  # fmt: skip


def test_a_pole_without_a_push_falls_and_one_that_is_upright_stands():
    state = tf.constant([[0.0, 0.0, 0.05, 0.0]])
    for _ in range(60):
        state = next_state(state, tf.constant([False]))
    assert not bool(is_upright(state)[0])
    assert bool(is_upright(tf.constant([[1.0, 0.0, 0.1, 0.0]]))[0])


def test_cartpole_plays_the_same_games_on_two_replicas(two_replicas):
    lengths = []
    for strategy in ("default", two_replicas):
        writer = ctl.MemoryWriter()
        CartPole(strategy=strategy, global_batch_size=8, game_steps=20, writers=[writer],
                 intervals=every_step()).train(5)  # fmt: skip
        lengths.append([values["game_length"] for _, _, values in writer.rows])
    np.testing.assert_allclose(*lengths, atol=0.5)
    np.testing.assert_allclose(lengths[0][:4], lengths[1][:4], atol=1e-5)


@pytest.mark.slow
def test_cartpole_learns_to_balance():
    writer = ctl.MemoryWriter()
    CartPole(strategy="default", global_batch_size=32, writers=[writer],
             intervals=every_step(log=ctl.Every(steps=20))).train(80)  # fmt: skip
    first, *_, last = [values["game_length"] for _, _, values in writer.rows]
    assert first < 80
    assert last > 150


def test_a_model_takes_a_config_or_the_same_as_keywords():
    settings = {"strategy": "default", "global_batch_size": 32, "seed": 5}
    from_config = Mnist(ctl.Config(**settings), dropout=0.1)
    from_keywords = Mnist(**settings, dropout=0.1)
    assert (
        from_config.config == from_keywords.config and from_config.dropout == from_keywords.dropout == 0.1
    )
    assert (from_config.global_batch_size, from_config.seed) == (32, 5)
