"""Copies of the errors of collectives, as other code creates them."""

import copy
import importlib
import pickle
import pkgutil

import ctl
import ctl.hvd as hvd
import keras
import pytest
import tensorflow as tf
from ctl.collectives.failures import LostRankError
from ctl.errors import EXIT_RETRY


def subclasses(base):
    return {base, *(deeper for direct in base.__subclasses__() for deeper in subclasses(direct))}


def error_classes():
    """All subclasses of OpError that `ctl` defines."""
    for module in pkgutil.walk_packages(ctl.__path__, "ctl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [error for error in subclasses(tf.errors.OpError) if error.__module__.startswith("ctl.")]


def test_errors_can_be_created_again_copied_and_pickled():
    classes = error_classes()
    assert LostRankError in classes
    for error_class in classes:
        error = error_class(None, None, "rank 1 is lost", tf.errors.UNKNOWN)
        created = error_class(error.node_def, error.op, "in a layer: " + error.message, error.error_code)
        assert str(created) == "in a layer: rank 1 is lost"
        for copied in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
            assert type(copied) is error_class and str(copied) == str(error) == "rank 1 is lost"


class LosesRank(keras.layers.Layer):
    def call(self, inputs):
        raise LostRankError("rank 1 is lost")


@pytest.mark.parametrize("entry_point", ["call", "fit"])
def test_a_lost_rank_in_a_keras_layer_is_an_error_that_elastic_training_catches(entry_point):
    model = keras.Sequential([keras.layers.Dense(1), LosesRank()])
    with pytest.raises(hvd.HorovodInternalError, match="rank 1 is lost") as caught:
        if entry_point == "call":
            model(tf.ones([2, 3]))
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(tf.ones([2, 3]), tf.ones([2, 1]), verbose=0)
    assert caught.value.exit_code == EXIT_RETRY
