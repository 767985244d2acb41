"""Seed generators of Keras 3 draw different seeds on each replica."""

import keras
import numpy as np
import pytest
from ctl.tensorflow_patches import seed_generators
from patching import parameters_of, turn_off


@pytest.fixture
def seeds(two_replicas):
    """Returns a function from a generator to the seeds that both replicas draw."""

    def draw(make):
        with two_replicas.scope():
            generator = make()
        values = two_replicas.run(generator.next)
        return [tuple(part.numpy()) for part in two_replicas.experimental_local_results(values)]

    return draw


def shifted():
    generator = keras.random.SeedGenerator(3)
    assert parameters_of(generator.next) == ["ordered"]
    seed_generators.shift_seeds(generator)
    return generator


def test_without_the_patch_both_replicas_draw_the_same_seed(seeds, monkeypatch):
    first, second = seeds(lambda: keras.random.SeedGenerator(3))
    assert first == second
    turn_off(monkeypatch, "seed_generators")
    assert seeds(shifted) == [first, second]


def test_only_the_first_number_of_the_seed_differs(seeds):
    first, second = seeds(shifted)
    assert first[0] != second[0] and first[1] == second[1]


def test_one_device_draws_the_original_seed():
    generator = keras.random.SeedGenerator(3)
    expected = generator.next().numpy()
    np.testing.assert_array_equal(shifted().next().numpy(), expected)


def test_layers_list_their_generators():
    layer = keras.layers.Dropout(0.5, seed=1)
    assert seed_generators.generators_of(layer) == [layer.seed_generator]
    assert seed_generators.generators_of(object()) == []
