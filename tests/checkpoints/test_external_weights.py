"""Warm start from checkpoints and weights files that TensorFlow, Keras 3 and tf_keras have written."""

import logging
import shutil

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import some_of
from ctl.checkpoints import external_weights
from ctl.distribute.keras_objects import unwrap
from small_models import Small, every_step

OPTIONS = dict(strategy="default", writers=[], intervals=every_step())
LIBRARIES = {"keras3": keras, "tf_keras": tf_keras}


def network(library, classes=4, seed=3, name=None, layers=("body", None, "head")):
    """Returns a model with random weights; layers without a name are numbered by Keras."""
    model = library.Sequential(
        [
            library.Input((8,)) if library is keras else library.layers.InputLayer((8,)),
            library.layers.Dense(16, activation="tanh", name=layers[0]),
            library.layers.BatchNormalization(name=layers[1]),
            library.layers.Dense(classes, name=layers[2]),
        ],
        name=name,
    )
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(size=w.shape).astype(np.float32) for w in model.get_weights()])
    return model


class Network(Small):
    """Trains `network`."""

    def __init__(self, library="keras3", classes=4, layers=("body", None, "head"), **options):
        super().__init__(**{**OPTIONS, **options})
        self._library, self._classes, self._layers = LIBRARIES[library], classes, layers

    def build(self):
        self.model = network(self._library, self._classes, seed=9, layers=self._layers)
        self.optimizer = self._library.optimizers.Adam(1e-2)


def trained_checkpoint(library, directory, **checkpoint_arguments):
    """Writes a checkpoint as Orbit does. Returns (prefix, weights)."""
    model, optimizer = network(library), library.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    zeros = [tf.ones(v.shape) for v in model.trainable_variables]
    optimizer.apply_gradients(zip(zeros, model.trainable_variables, strict=True))
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=optimizer, global_step=tf.Variable(7), **checkpoint_arguments
    )
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=2)
    manager.save(5)
    return manager.save(7), model.get_weights()


def assert_weights(trainer, expected):
    for actual, value in zip(trainer.model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(actual, value)


def prepared(source, library="keras3", **options):
    trainer = Network(library, init_from=str(source), **options)
    trainer.prepare()
    return trainer


def messages(caplog):
    return [r.getMessage() for r in caplog.records if "--init_from" in r.getMessage()]


SOURCE_KINDS = ["prefix", "index file", "directory", "moved directory", "model_dir"]


@pytest.mark.parametrize("source_kind", some_of(SOURCE_KINDS, "prefix", "directory", "model_dir"))
@pytest.mark.parametrize("library", some_of(["keras3", "tf_keras"], "tf_keras"))
def test_a_checkpoint_of_orbit_s_structure_is_loaded(tmp_path, caplog, library, source_kind):
    caplog.set_level(logging.INFO, "ctl")
    directory = tmp_path / "checkpoints" if source_kind == "model_dir" else tmp_path / "c[1]"
    prefix, expected = trained_checkpoint(LIBRARIES[library], directory)
    source = {
        "prefix": prefix,
        "index file": f"{prefix}.index",
        "directory": directory,
        "moved directory": tmp_path / "moved",
        "model_dir": tmp_path,
    }[source_kind]
    if source_kind == "moved directory":
        shutil.move(directory, source)
    trainer = prepared(source, library)
    assert_weights(trainer, expected)
    assert trainer.step == 0
    slots = [unwrap(v).numpy() for v in trainer.optimizer.variables if len(v.shape) == 2]
    assert slots and not any(map(np.any, slots))
    [message] = messages(caplog)
    assert "matched 8 of 8 variables; not matched: none" in message
    assert "ckpt-7" in message and "head/kernel from model/" in message


@pytest.mark.parametrize("exported_by", ["ctl", "keras3", "tf_keras"])
def test_an_exported_model_is_loaded(tmp_path, caplog, exported_by):
    caplog.set_level(logging.INFO, "ctl")
    source = tmp_path / "saved_model"
    if exported_by == "ctl":
        trainer = Network()
        trainer.prepare()
        model = trainer.model
        model.set_weights([value + 1 for value in model.get_weights()])
        trainer.export("saved_model", directory=str(tmp_path))
    else:
        model = network(LIBRARIES[exported_by])
        model.export(str(source))
    assert_weights(prepared(source), model.get_weights())
    [message] = messages(caplog)
    assert "matched 8 of 8 variables; not matched: none" in message


@pytest.mark.parametrize("written_by", ["keras3", "tf_keras"])
@pytest.mark.parametrize("read_by", ["keras3", "tf_keras"])
@pytest.mark.parametrize("file_type", ["weights.h5", "keras", "checkpoint"])
def test_weights_of_one_keras_are_loaded_in_the_other(tmp_path, written_by, read_by, file_type):
    model = network(LIBRARIES[written_by])
    path = str(tmp_path / f"saved.{file_type}")
    if file_type == "weights.h5":
        model.save_weights(path)
    elif file_type == "keras":
        model.save(path)
    else:
        path = tf.train.Checkpoint(model=model).write(path)
    assert_weights(prepared(path, read_by), model.get_weights())


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_slots_of_the_optimizer_in_a_keras_file_are_left_out(tmp_path, caplog, library):
    caplog.set_level(logging.INFO, "ctl")
    model = network(LIBRARIES[library])
    model.compile(LIBRARIES[library].optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "a.keras")
    assert_weights(prepared(tmp_path / "a.keras", library), model.get_weights())
    [message] = messages(caplog)
    assert "not matched: none" in message


@pytest.mark.slow
def test_older_files_of_tf_keras_are_loaded(tmp_path):
    model = network(tf_keras)
    model.save_weights(str(tmp_path / "tf"), save_format="tf")
    model.save_weights(str(tmp_path / "old.h5"))
    model.save(str(tmp_path / "whole.h5"))
    model.save(str(tmp_path / "saved_model"))
    for name in ("tf", "old.h5", "whole.h5", "saved_model"):
        assert_weights(prepared(tmp_path / name, "tf_keras"), model.get_weights())
        assert_weights(prepared(tmp_path / name, "keras3"), model.get_weights())


@pytest.mark.parametrize("file_name", ["old.h5", "checkpoint"])
def test_a_layer_whose_name_begins_like_an_optimizer_is_loaded(tmp_path, file_name):
    layers, path = ("optimal_body", None, "optimum"), str(tmp_path / file_name)
    model = network(tf_keras, layers=layers)
    if file_name == "old.h5":
        model.save_weights(path)
    else:
        named = tf.Module()
        named.optimal_model = model
        tf.train.Checkpoint(model=named, head_optimizer=tf.Module()).write(path)
    assert_weights(prepared(path, "tf_keras", layers=layers), model.get_weights())


@pytest.mark.parametrize(
    ("name", "is_optimizer"),
    [
        *[(name, True) for name in ("optimizer", "_optimizer", "gen_optimizer", "optimizer_2", "optimizerG",
          "optim", "d_optim", "AdamOptimizer", "optimizers", "optimizer_weights/adam", "OptimizeLoss/rate",
          "w/.OPTIMIZER_SLOT/optimizer/m", "optimiser")],
        *[(name, False) for name in ("optimal_head", "optimum", "optimization_head", "a/optimal/kernel")],
    ],
)  # fmt: skip
def test_optimizers_are_recognized_by_whole_words(name, is_optimizer):
    assert bool(external_weights._OPTIMIZER.search(name)) == is_optimizer


@pytest.mark.parametrize("file_type", ["checkpoint", "weights.h5"])
def test_another_head_is_listed_and_not_changed(tmp_path, caplog, file_type):
    caplog.set_level(logging.INFO, "ctl")
    model = network(keras)
    path = str(tmp_path / f"a.{file_type}")
    if file_type == "checkpoint":
        tf.train.Checkpoint(model=model).write(path)
    else:
        model.save_weights(path)
    trainer = prepared(path, classes=7)
    fresh = network(keras, classes=7, seed=9)
    assert_weights(trainer, [*model.get_weights()[:6][:2], *trainer.model.get_weights()[2:]])
    np.testing.assert_array_equal(trainer.model.layers[-1].kernel, fresh.layers[-1].kernel)
    [message] = messages(caplog)
    assert "matched 6 of 8 variables" in message
    assert "head/kernel (float32[16, 4] in the checkpoint, float32[16, 7] in this model)" in message


@pytest.mark.parametrize("file_type", ["checkpoint", "weights.h5"])
def test_a_model_without_matches_is_refused_with_both_lists(tmp_path, file_type):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(9, name="other")])
    path = str(tmp_path / f"a.{file_type}")
    if file_type == "checkpoint":
        tf.train.Checkpoint(model=model).write(path)
    else:
        model.save_weights(path)
    with pytest.raises(ctl.UsageError, match="matched 0 of 8 variables") as raised:
        prepared(path)
    assert raised.value.exit_code == 2
    assert "body/kernel float32[8, 16]" in str(raised.value) and "float32[5, 9]" in str(raised.value)


@pytest.mark.parametrize(("first", "second"), [(7, 8), (8, 10)])
def test_numbers_that_keras_assigned_may_be_shifted(tmp_path, first, second):
    model = network(tf_keras, layers=(f"dense_{first}", "batch_normalization_3", f"dense_{second}"))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "a"))
    assert_weights(prepared(path, layers=("dense", "batch_normalization", "dense_1")), model.get_weights())


@pytest.mark.parametrize("attribute", ["model", "net"])
def test_numbers_with_an_unclear_shift_are_refused(tmp_path, attribute):
    model = network(tf_keras, layers=("dense_1", "batch_normalization", "dense_2"))
    path = tf.train.Checkpoint(**{attribute: model}).write(str(tmp_path / "a"))
    with pytest.raises(ctl.CheckpointError, match="dense/kernel, dense_1/kernel in this model, dense_1/k"):
        prepared(path, layers=("dense", "batch_normalization", "dense_1"))


class TwoModels(Network):
    def build(self):
        super().build()
        self.other = network(keras, seed=10)


def test_models_are_found_under_their_attributes(tmp_path):
    models = {name: network(keras, seed=seed) for name, seed in [("model", 1), ("other", 2), ("third", 3)]}
    path = tf.train.Checkpoint(**models).write(str(tmp_path / "a"))
    trainer = TwoModels(init_from=path)
    trainer.prepare()
    assert_weights(trainer, models["model"].get_weights())
    for actual, expected in zip(trainer.other.get_weights(), models["other"].get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_several_possible_matches_are_refused(tmp_path):
    first, second = network(keras, seed=1), network(keras, seed=2)
    path = tf.train.Checkpoint(generator=first, ema=second).write(str(tmp_path / "a"))
    with pytest.raises(ctl.CheckpointError, match="may be ema/.* or generator/") as raised:
        prepared(path)
    assert raised.value.exit_code == 2
    first.save_weights(str(tmp_path / "a.weights.h5"))
    trainer = TwoModels(init_from=str(tmp_path / "a.weights.h5"))
    with pytest.raises(ctl.CheckpointError, match="layers/dense/vars/0 may be model/.* or other/"):
        trainer.prepare()


@pytest.mark.parametrize("file_type", ["checkpoint", "weights.h5"])
def test_structure_and_names_that_contradict_each_other_are_refused(tmp_path, file_type):
    def chain(*names):
        layers = [keras.layers.Dense(8, name=name) for name in names]
        return keras.Sequential([keras.Input((8,)), *layers])

    class Chain(Network):
        def build(self):
            self.model = chain("b", "a")
            self.optimizer = keras.optimizers.SGD(0.1)

    model = chain("a", "b")
    path = str(tmp_path / f"a.{file_type}")
    if file_type == "checkpoint":
        tf.train.Checkpoint(model=model).write(path)
    else:
        model.save_weights(path)
    with pytest.raises(ctl.CheckpointError, match="cannot be matched"):
        Chain(init_from=path).prepare()


def test_a_model_of_tf_module_is_loaded(tmp_path):
    source = Small(framework="module", optimizer="adam", **OPTIONS)
    source.train(2)
    path = tf.train.Checkpoint(model=source.model, optimizer=source.optimizer).write(str(tmp_path / "a"))
    trainer = Small(framework="module", optimizer="adam", init_from=path, **OPTIONS)
    trainer.prepare()
    for actual, expected in zip(trainer.model.layers, source.model.layers, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert float(trainer.optimizer.count) == 0.0


def test_two_replicas_start_with_the_same_values(tmp_path):
    path, expected = trained_checkpoint(keras, tmp_path / "a")
    network(keras).save_weights(str(tmp_path / "a.weights.h5"))
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    trainer = prepared(path, strategy=strategy)
    assert_weights(trainer, expected)
    for variable in trainer.model.variables:
        first, second = strategy.experimental_local_results(unwrap(variable))
        np.testing.assert_array_equal(first, second)
    assert_weights(prepared(tmp_path / "a.weights.h5", strategy=strategy), network(keras).get_weights())


def test_a_resumed_run_ignores_the_weights(tmp_path):
    path, _ = trained_checkpoint(keras, tmp_path / "a")
    first = Network(init_from=path, model_dir=str(tmp_path / "run"))
    first.train(2)
    resumed = Network(init_from=str(tmp_path / "nowhere"), model_dir=str(tmp_path / "run"))
    resumed.prepare()
    assert resumed.step == 2
    assert_weights(resumed, first.model.get_weights())


@pytest.mark.parametrize("name", ["a.weights.h5", "a.keras", "a"])
def test_a_damaged_file_is_an_error(tmp_path, name):
    if name == "a":
        tf.train.Checkpoint(model=network(keras)).write(str(tmp_path / "a"))
        path = tmp_path / "a.index"
    else:
        path = tmp_path / name
        network(keras).save_weights(path) if name.endswith("h5") else network(keras).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ctl.CheckpointError, match="cannot be read") as raised:
        prepared(tmp_path / name)
    assert raised.value.exit_code == 2


def test_a_directory_with_a_deleted_checkpoint_is_an_error(tmp_path):
    path, _ = trained_checkpoint(keras, tmp_path)
    (tmp_path / f"{path.rpartition('/')[2]}.index").unlink()
    with pytest.raises(ctl.UsageError, match="ckpt-7.*does not exist"):
        prepared(tmp_path)


WORKERS = """
import json, logging, sys
import ctl
from small_models import Small, digest, every_step

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
trainer = Small(strategy="multi_worker", writers=[], intervals=every_step(), init_from=sys.argv[1])
try:
    trainer.prepare()
    print(json.dumps({"digest": digest(trainer)}), flush=True)
except ctl.CtlError as e:
    print(json.dumps({"code": e.exit_code}), flush=True)
"""


@pytest.mark.workers
def test_two_workers_load_the_same_weights(run_program, tmp_path):
    original = Small(**OPTIONS)
    original.train(2)
    checkpoint = tf.train.Checkpoint(model=original.model, optimizer=original.optimizer)
    path = checkpoint.save(str(tmp_path / "c/ckpt"))
    original.model.save_weights(str(tmp_path / "a.weights.h5"))
    from small_models import digest

    for source in (path, str(tmp_path / "c"), str(tmp_path / "a.weights.h5")):
        results = run_program(2, ["-c", WORKERS, source])
        assert [r.json for r in results] == [{"digest": digest(original)}] * 2, results[1].output
        matched = [r.output.count("matched 4 of 4 variables") for r in results]
        assert matched == [1, 0], results[0].output
    (tmp_path / "a.weights.h5").write_bytes(b"damaged")
    results = run_program(2, ["-c", WORKERS, str(tmp_path / "a.weights.h5")])
    assert [r.json for r in results] == [{"code": 2}] * 2
