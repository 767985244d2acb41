"""Paths of variables in weights files of Keras 3 and tf_keras."""

import h5py
import keras
import numpy as np
import pytest
import tf_keras
from ctl.tensorflow_patches import keras_weight_paths


def nested(library):
    class Block(library.layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [library.layers.Dense(3), library.layers.Dense(3)]
            self.norm = library.layers.BatchNormalization()

        def call(self, x):
            return self.norm(self.parts[1](self.parts[0](x)))

    inner = library.Sequential([library.layers.Dense(3, name="first"), library.layers.Dense(3)])
    shared = library.layers.Dense(3)
    inputs = library.Input((3,))
    outputs = library.layers.Dense(2)(shared(Block()(inner(shared(inputs)))))
    return library.Model(inputs, outputs)


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_the_paths_are_those_of_a_saved_file(library, tmp_path):
    model = nested(library)
    for number, variable in enumerate(model.variables):
        variable.assign(np.full(variable.shape, float(number), np.float32))
    model.save_weights(str(tmp_path / "a.weights.h5"))
    paths = keras_weight_paths.weight_paths(model)
    with h5py.File(tmp_path / "a.weights.h5") as file:
        saved = {}
        file.visititems(lambda k, v: saved.update({k: v[()]}) if isinstance(v, h5py.Dataset) else None)
    assert saved.keys() == paths.keys()
    for path, value in saved.items():
        np.testing.assert_array_equal(paths[path][0].numpy(), value, err_msg=path)
    assert "first" in {layer_name for _, layer_name in paths.values()}


def test_other_objects_have_no_paths():
    assert keras_weight_paths.weight_paths([1]) == {}
    assert keras_weight_paths.weight_paths(keras.optimizers.SGD(0.1)) == {}
