"""Exported files: they load without ctl and give the same predictions."""

import shutil
import sys
from pathlib import Path

import ctl
import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
import tf_keras
from conftest import PROGRAMS, environment, some_of
from ctl.io import paths
from small_models import PlainModel, Small, every_step, examples, weights
from two_models import Pair

NO_REPORTS = dict(strategy="default", writers=[], intervals=every_step(log=ctl.Every()))

LOAD_WITHOUT_CTL = """
import json, sys
import keras, numpy as np, tensorflow as tf
x = np.load(sys.argv[1] + "/x.npy")
model = keras.models.load_model(sys.argv[1] + "/model.keras")
saved = tf.saved_model.load(sys.argv[1] + "/saved_model")
predictions = model.predict(x, verbose=0)
served = saved.serve(tf.constant(x))
rebuilt = keras.models.clone_model(model)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rebuilt.load_weights(sys.argv[1] + "/model.weights.h5")
rebuilt_predictions = rebuilt.predict(x, verbose=0)
history = model.fit(x, np.zeros(len(x)), epochs=3, verbose=0).history["loss"]
print(json.dumps({"keras": predictions.tolist(), "saved_model": np.asarray(served).tolist(),
                  "weights": rebuilt_predictions.tolist(), "losses": history, "ctl": "ctl" in sys.modules}))
"""


def make_trainer(trainer_class=Small, **options):
    trainer = trainer_class(**NO_REPORTS, **options)
    trainer.prepare()
    return trainer


def names(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.workers
def test_every_format_predicts_the_same_in_a_process_without_ctl(tmp_path, run_program):
    trainer = Small(model_dir=str(tmp_path), **NO_REPORTS)
    trainer.train(2, export=("keras", "saved_model", "weights"))
    x = examples()[0][:5]
    np.save(tmp_path / "export" / "x.npy", x)
    assert names(tmp_path / "export") == ["model.keras", "model.weights.h5", "saved_model", "x.npy"]
    result = run_program(1, ["-c", LOAD_WITHOUT_CTL, str(tmp_path / "export")], fresh=True)[0]
    assert result.code == 0, result.output
    expected = trainer.model(x).numpy()
    for export_format in ("keras", "saved_model", "weights"):
        np.testing.assert_allclose(result.json[export_format], expected, atol=1e-6)
    assert result.json["losses"][-1] < result.json["losses"][0], "the loaded model is trainable"
    assert not result.json["ctl"]


def test_exporting_again_replaces_the_files_and_leaves_no_temporary_ones(tmp_path):
    trainer = make_trainer()
    exported = trainer.export(directory=str(tmp_path))
    assert exported == [str(tmp_path / "model.keras"), str(tmp_path / "saved_model")]
    (tmp_path / "saved_model" / "old").touch()
    trainer.model.set_weights([w * 0 for w in trainer.model.get_weights()])
    assert trainer.export("keras", "saved_model", directory=str(tmp_path)) == exported
    assert names(tmp_path) == ["model.keras", "saved_model"]
    assert not (tmp_path / "saved_model" / "old").exists()
    loaded = tf.saved_model.load(str(tmp_path / "saved_model"))
    assert (loaded.serve(examples()[0][:2]).numpy() == 0).all()


@pytest.mark.parametrize("exchanged", some_of([True, False], True))
def test_a_directory_is_complete_at_every_moment_of_its_replacement(tmp_path, monkeypatch, exchanged):
    if not exchanged:  # without renameat2 (not on Linux) the directory is missing during one rename
        monkeypatch.setattr(paths.ctypes, "CDLL", lambda name: None)
    trainer = make_trainer()
    trainer.export("saved_model", directory=str(tmp_path))
    is_complete, rmtree = [], shutil.rmtree

    def remove_and_check(path, *args, **options):
        rmtree(path, *args, **options)
        is_complete.append((tmp_path / "saved_model" / "saved_model.pb").exists())

    monkeypatch.setattr(shutil, "rmtree", remove_and_check)
    trainer.export("saved_model", directory=str(tmp_path))
    assert len(is_complete) >= 3 and all(is_complete)
    assert names(tmp_path) == ["saved_model"]


def test_an_export_that_fails_leaves_the_old_files(tmp_path):
    trainer = make_trainer()
    trainer.export("keras", directory=str(tmp_path))
    before = (tmp_path / "model.keras").read_bytes()

    def fail(path):
        tf.io.gfile.GFile(path, "w").write("half")
        raise OSError("disk full")

    trainer.model.save = fail
    with pytest.raises(OSError, match="disk full"):
        trainer.export("keras", directory=str(tmp_path))
    assert names(tmp_path) == ["model.keras"]
    assert (tmp_path / "model.keras").read_bytes() == before


class Callable(Small):
    """A trainer of a tf.Module with a tf.function that a SavedModel can serve."""

    def build(self):
        self.framework, self.word = "module", "sgd"
        super().build()
        PlainCallable = type("PlainCallable", (PlainModel,), {
            "predict": tf.function(
                lambda self, x: self(x), input_signature=[tf.TensorSpec([None, 8], tf.float32)])
        })  # fmt: skip
        self.model = PlainCallable()


def test_a_module_becomes_a_saved_model_with_its_functions(tmp_path):
    trainer = make_trainer(Callable)
    assert trainer.export(directory=str(tmp_path)) == [str(tmp_path / "saved_model")]
    x = examples()[0][:3]
    loaded = tf.saved_model.load(str(tmp_path / "saved_model"))
    np.testing.assert_allclose(loaded.predict(x), trainer.model(x), atol=1e-6)


def test_a_format_that_a_module_cannot_have_is_refused(tmp_path):
    with pytest.raises(ctl.UsageError, match="keras"):
        make_trainer(Callable).export("keras", directory=str(tmp_path))


@pytest.mark.parametrize("export_format", ["keras", "weights", "saved_model"])
def test_a_tf_keras_model_is_exported_too(tmp_path, export_format):
    trainer = make_trainer(framework="tf_keras")
    (path,) = trainer.export(export_format, directory=str(tmp_path))
    x = examples()[0][:3]
    expected = trainer.model(x).numpy()
    if export_format == "keras":
        np.testing.assert_allclose(tf_keras.models.load_model(path)(x), expected, atol=1e-6)
    elif export_format == "weights":
        weights_before = weights(trainer)
        trainer.model.set_weights([w * 0 for w in weights_before])
        trainer.model.load_weights(path)
        for a, b in zip(weights_before, weights(trainer), strict=True):
            np.testing.assert_array_equal(a, b)
    else:
        loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(loaded.serve(x), expected, atol=1e-6)


def test_an_unknown_format_is_refused_with_the_known_formats(tmp_path):
    with pytest.raises(ctl.UsageError, match="'onnx'.*keras, saved_model, weights"):
        make_trainer().export("onnx", directory=str(tmp_path))
    assert not (tmp_path / "model.keras").exists()


def test_an_export_requires_a_directory():
    with pytest.raises(ctl.UsageError, match=r"directory=\.\.\., or the trainer a model_dir"):
        make_trainer().export("keras")


@pytest.mark.parametrize("formats", [("onnx",), ("keras",)], ids=["unknown", "no directory"])
def test_train_refuses_an_impossible_export_before_any_work(formats):
    trainer = Small(**NO_REPORTS)
    with pytest.raises(ctl.UsageError):
        trainer.train(1, export=formats)
    assert trainer.step == 0


class Served(Small):
    """A trainer with signatures for the softmax and the most likely class."""

    def signatures(self):
        def probabilities(x):
            return {"probabilities": tf.nn.softmax(self.model(x))}

        spec = tf.TensorSpec([None, 8], tf.float32, name="x")
        served = tf.function(probabilities, input_signature=[spec])
        largest = tf.function(lambda x: {"class": tf.argmax(self.model(x), 1)}, input_signature=[spec])
        return {"serving_default": served, "largest": largest}


SERVED = [(f, where) for f in ("keras3", "tf_keras", "module") for where in ("one device", "two replicas")]
FEW_SERVED = ("keras3", "two replicas"), ("tf_keras", "one device"), ("module", "one device")


@pytest.mark.parametrize("case", some_of(SERVED, *FEW_SERVED), ids="-".join)
def test_a_saved_model_serves_the_signatures(tmp_path, two_replicas, case):
    framework, where = case
    trainer = Served(framework=framework, **{
        **NO_REPORTS, "strategy": "default" if where == "one device" else two_replicas})  # fmt: skip
    (path,) = trainer.export("saved_model", directory=str(tmp_path))
    signatures = tf.saved_model.load(path).signatures
    x = tf.constant(examples()[0][:5])
    logits = trainer.model(x)
    probabilities = signatures["serving_default"](x=x)["probabilities"]
    np.testing.assert_allclose(probabilities, tf.nn.softmax(logits), atol=1e-6)
    assert (signatures["largest"](x=x)["class"].numpy() == tf.argmax(logits, 1).numpy()).all()


@pytest.mark.parametrize(
    "signatures", [None, {"serve": len}, {"serve": tf.function(lambda x: x)}, {1: None}],
    ids=["nothing", "no tf.function", "no input_signature", "no name"],
)  # fmt: skip
def test_signatures_that_cannot_be_served_are_refused_before_any_work(tmp_path, signatures):
    trainer_class = type("Invalid", (Small,), {"signatures": lambda self: signatures})
    trainer = trainer_class(model_dir=str(tmp_path), **NO_REPORTS)
    with pytest.raises(ctl.UsageError, match=r"signatures\(\) returned .*input_signature"):
        trainer.train(1, export=["saved_model"])
    assert trainer.step == 0


def test_models_are_exported_by_name(tmp_path):
    trainer = Pair(**NO_REPORTS)
    formats = "generator:keras", "critic:keras", "generator:weights"
    paths = trainer.export(*formats, directory=str(tmp_path))
    assert [str(Path(p).relative_to(tmp_path)) for p in paths] == [
        "generator/model.keras", "critic/model.keras", "generator/model.weights.h5"
    ]  # fmt: skip
    assert names(tmp_path) == ["critic", "generator"]
    x = np.ones([3, 4], np.float32)
    loaded = keras.models.load_model(paths[0])
    np.testing.assert_allclose(loaded(x), trainer.generator(x), atol=1e-6)


@pytest.mark.parametrize(
    ("formats", "error_pattern"),
    [
        ((), r"export of keras: self.model is not set; expected one of generator, critic.*generator:keras"),
        (("keras",), "self.model is not set; expected one of generator, critic"),
        (("generater:keras",), "export of generater:keras: self.generater is not set; expected one of"),
        (("seed:keras",), "self.seed is 0, which cannot be written; expected one of"),
        (("generator:onnx",), "expected none, or some of keras"),
    ],
)
def test_an_export_without_a_model_names_the_models(formats, error_pattern, tmp_path):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        Pair(**NO_REPORTS).export(*formats, directory=str(tmp_path))


def test_a_training_with_an_export_without_a_model_is_refused_before_its_first_step(tmp_path):
    trainer = Pair(model_dir=str(tmp_path / "run"), **NO_REPORTS)
    with pytest.raises(ctl.UsageError, match="--export=generator:keras"):
        trainer.train(2, export=["keras"])
    assert trainer.step == 0
    trainer.train(2, export=["generator:keras"])
    assert (tmp_path / "run/export/generator/model.keras").stat().st_size


def test_the_command_line_refuses_an_export_without_a_model_and_logs_a_skipped_export(tmp_path):
    program = [sys.executable, str(PROGRAMS / "two_models.py"), "--global_batch_size=8"]

    def run(*arguments):
        return processes.run([*program, f"--model_dir={tmp_path}", *arguments], env=environment())

    trained = run("--train_steps=2", "--mode=train")
    assert trained.returncode == 0, trained.stderr
    assert "No model is exported at the end: " in trained.stderr and "generator:keras" in trained.stderr
    refused = run("--mode=export")
    assert refused.returncode == 2 and "expected one of " in refused.stderr, refused.stderr
    exported = run("--mode=export", "--export=generator:keras")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.strip() == f"{tmp_path}/export/generator/model.keras"
