"""`ctl doctor`: diagnosis as text and as JSON, and exit code 2 for problems."""

import json
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from ctl.tools import doctor
from test_platforms import ADDRESSES, EVALUATOR, spec, tf_config


def diagnose(**environ):
    return doctor.diagnose(environ, network=False)


def test_a_single_process():
    diagnosis = diagnose()
    assert diagnosis["task"] == {
        "type": "worker", "index": 0, "address": None, "rank": 0, "is_chief": True,
    }  # fmt: skip
    assert (diagnosis["cluster"], diagnosis["tf_config"], diagnosis["problems"]) == ({}, None, [])
    text = doctor.diagnosis_text(diagnosis)
    assert "a single process" in text and text.endswith("No problems found.")


def test_vertex_ai_with_its_directories():
    diagnosis = diagnose(
        **spec("workerpool1", 1, workerpool3=EVALUATOR), AIP_MODEL_DIR="gs://b/job/model/",
        AIP_CHECKPOINT_DIR="gs://b/job/checkpoints/", AIP_TENSORBOARD_LOG_DIR="gs://b/job/logs/",
    )  # fmt: skip
    assert (diagnosis["platform"], diagnosis["sources"]) == ("Vertex AI", ["CLUSTER_SPEC"])
    assert (diagnosis["task"]["rank"], diagnosis["num_workers"], diagnosis["has_evaluator"]) == (2, 3, True)
    assert diagnosis["tf_config"]["task"] == {"type": "worker", "index": 1}
    assert list(diagnosis["tf_config"]["cluster"]) == ["chief", "worker"]
    assert diagnosis["directories"] == {
        "model_dir": "gs://b/job", "logs": "gs://b/job/logs", "model": "gs://b/job/model",
        "sources": ["AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR", "AIP_MODEL_DIR"],
    }  # fmt: skip
    text = doctor.diagnosis_text(diagnosis)
    assert any("not written to a URL" in note for note in diagnosis["notes"])
    assert "by         AIP_CHECKPOINT_DIR, AIP_TENSORBOARD_LOG_DIR, AIP_MODEL_DIR" in text
    for text_part in ("worker 1, rank 2 of 3", "Vertex AI", "another process evaluates", "gs://b/job/logs"):
        assert text_part in text


def test_a_problem_is_reported_with_the_other_settings():
    diagnosis = diagnose(TF_CONFIG="{", AIP_MODEL_DIR="gs://b/m/")
    assert diagnosis["task"] is None and diagnosis["directories"]["model"] == "gs://b/m"
    [problem] = diagnosis["problems"]
    assert "TF_CONFIG is not JSON" in problem
    assert f"problem: {problem}" in doctor.diagnosis_text(diagnosis)


def test_unused_variables_are_named():
    both = tf_config({"worker": ["a:1", "b:1"]}, "worker") | {"CTL_WORKERS": ADDRESSES}
    assert diagnose(**both)["also_set"] == ["CTL_WORKERS"]
    assert "CTL_WORKERS (not used)" in doctor.diagnosis_text(diagnose(**both))


def test_many_workers_are_not_all_listed():
    workers = [f"w{i}:1" for i in range(30)]
    text = doctor.diagnosis_text(diagnose(**tf_config({"worker": workers}, "worker", 29)))
    assert "w7:1 and 22 more" in text and "w8:1" not in text and "address    w29:1" in text


def test_unresolved_names_are_a_note_and_a_port_in_use_is_a_problem():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        own_address = f"localhost:{server.getsockname()[1]}"
        cluster = {"worker": [own_address, "nobody.invalid:1"]}
        diagnosis = doctor.diagnose(tf_config(cluster, "worker"), network=True)
    assert any("'nobody.invalid' cannot be resolved yet" in note for note in diagnosis["notes"])
    [problem] = diagnosis["problems"]
    assert f"this task's address {own_address} is in use" in problem


def test_a_directory_that_is_not_writable_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    checkpoint_dir = f"{tmp_path}/file/checkpoints/"
    diagnosis = diagnose(AIP_CHECKPOINT_DIR=checkpoint_dir, AIP_MODEL_DIR=f"{tmp_path}/new")
    assert len(diagnosis["problems"]) == 1 and "is not writable" in diagnosis["problems"][0]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("installed", "error_message"), [
    ({"tensorflow": "2.15.1"}, "TensorFlow is 2.15.1"), ({}, "TensorFlow is not installed"),
])  # fmt: skip
def test_an_unsupported_tensorflow_is_a_problem(installed, error_message, monkeypatch):
    def version(name):
        if name not in installed:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert any(error_message in problem for problem in diagnose()["problems"])


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(as_json):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    valid_environ = environment(**tf_config({"worker": addresses}, "worker", 1))
    invalid_environ = environment(**tf_config({"worker": addresses}, "worker", 2))
    for environ, code in ((valid_environ, 0), (invalid_environ, 2)):
        command = [sys.executable, "-m", "ctl", "doctor", *(["--json"] if as_json else [])]
        result = subprocess.run(
            command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_SECS,
        )
        assert (result.returncode, result.stderr) == (code, "")
        assert ("index 0 to 1" in result.stdout) == bool(code)
        if as_json:
            assert len(json.loads(result.stdout)["problems"]) == bool(code)
