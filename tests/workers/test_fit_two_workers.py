"""`ctl.fit` on two workers, where `Model.fit` fails: the results of `Model.fit` on one device."""

import json
import sys

import keras
import numpy as np
import overriding
import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from fitting import agreed, assert_same, fitted

from models.data import digits

pytestmark = pytest.mark.workers
# a selection: code paths that differ between workers and local replicas
CASES = ("adam", "average every 5", "two outputs", "normalised", "endless dataset")


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def workers(run_program, output_dir):
    return run_program(2, ["tests/programs/fitting.py", "multi_worker", ",".join(CASES), str(output_dir)])


def test_decisions_of_the_chief_s_keras_callbacks_apply_on_both_workers(workers, output_dir, tmp_path):
    first, second = (w.json["agreed"] for w in workers)
    assert first["history"] == second["history"] and first["weights"] == second["weights"]
    assert first["seen"] == second["seen"] and first["stop"] == second["stop"] is True
    assert sorted(p.name for p in output_dir.iterdir()) == ["0.csv", "0.keras"]
    expected = agreed(None, tmp_path)
    assert [s[0] for s in first["seen"]] == [s[0] for s in expected["seen"]] == [0, 1]
    for a, b in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_three_epochs_on_two_workers_are_those_of_model_fit_on_one_device(workers, name):
    first, second = (w.json[name] for w in workers)
    assert first == second
    assert_same(name, first, fitted(name))


@pytest.mark.smoke
def test_the_tutorial_s_script_runs_with_three_changed_lines(run_program, tmp_path):
    for result in run_program(2, ["tests/programs/keras_tutorial.py", str(tmp_path), "20"]):
        assert result.code == 0, result.output[-2000:]
        assert result.json["loss"][2] < 0.7 * result.json["loss"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["keras-model.keras"]
    test = digits.load("shipped")["test"]
    model = keras.models.load_model(tmp_path / "keras-model.keras")
    _, accuracy = model.evaluate(test["image"] / np.float32(255), test["label"], verbose=0)
    assert accuracy > 0.6


def test_workers_that_shuffle_without_a_seed_are_refused(run_program, tmp_path):
    source = (ROOT / "tests/programs/keras_tutorial.py").read_text()
    script = tmp_path / "tutorial.py"
    script.write_text(source.replace("ctl.make_strategy()", "tf.distribute.MultiWorkerMirroredStrategy()"))
    for result in run_program(2, [str(script), str(tmp_path), "5"]):
        assert result.code == 2
        assert "is shuffled without a seed" in result.output


@pytest.mark.slow
def test_parameter_servers_train_a_compiled_model_and_count_every_example(tmp_path):
    program = str(ROOT / "tests/programs/fit_served.py")
    completed = processes.run(
        [sys.executable, "-m", "ctl", "launch", "--workers=2", "--ps=1", "--chief",
         f"--log_dir={tmp_path}", "--", sys.executable, program],
        env=environment(), timeout=TIMEOUT_SECS,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-2000:]
    history = json.loads([line for line in completed.stdout.splitlines() if line.startswith("{")][-1])
    assert history["iterations"] == 6 * 16
    num_correct = np.asarray(history["accuracy"]) * 512
    np.testing.assert_allclose(num_correct, np.round(num_correct), atol=1e-3)  # each example counted once
    assert history["val_accuracy"][-1] > 0.9


def test_an_interrupted_fit_of_a_model_with_overrides_resumes_from_its_backup(run_program, tmp_path):
    """Interrupted after step 5 of 9, in the second epoch."""
    program = ["tests/programs/overriding.py", str(tmp_path)]
    assert {result.code for result in run_program(2, [*program, "5"])} == {143}
    first, second = (result.json for result in run_program(2, program))
    assert first == second
    model, records = overriding.compiled(overriding.ReadsText), overriding.Records()
    expected = overriding.trained(model.fit, [records])
    assert len(records.lines) == 9 and len(first["evaluations"]) == 6  # of epochs 2 and 3
    np.testing.assert_allclose(first["evaluations"], records.lines[3:], atol=1e-5)
    assert first["history"].keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(first["history"][name], values[1:], atol=1e-5, err_msg=name)
    for a, b in zip(first["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not list(tmp_path.rglob("ckpt-*"))  # as after BackupAndRestore
