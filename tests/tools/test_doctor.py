"""`ctl doctor`: the same facts for people and as JSON, and 2 where something is wrong."""

import json
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, environment, free_ports
from ctl.tools import doctor
from test_platforms import ADDRESSES, EVALUATOR, spec, tf_config


def diagnose(**environ):
    return doctor.diagnose(environ, network=False)


def test_a_process_alone():
    seen = diagnose()
    assert seen["task"] == {
        "type": "worker", "index": 0, "address": None, "rank": 0, "is_chief": True,
    }  # fmt: skip
    assert (seen["cluster"], seen["tf_config"], seen["problems"]) == ({}, None, [])
    text = doctor.diagnosis_text(seen)
    assert "a single process" in text and text.endswith("No problems found.")


def test_vertex_ai_with_its_directories():
    seen = diagnose(
        **spec("workerpool1", 1, workerpool3=EVALUATOR), AIP_MODEL_DIR="gs://b/job/model/",
        AIP_CHECKPOINT_DIR="gs://b/job/checkpoints/", AIP_TENSORBOARD_LOG_DIR="gs://b/job/logs/",
    )  # fmt: skip
    assert (seen["platform"], seen["sources"]) == ("Vertex AI", ["CLUSTER_SPEC"])
    assert (seen["task"]["rank"], seen["num_workers"], seen["has_evaluator"]) == (2, 3, True)
    assert seen["tf_config"]["task"] == {"type": "worker", "index": 1}
    assert list(seen["tf_config"]["cluster"]) == ["chief", "worker"]
    assert seen["directories"] == {
        "model_dir": "gs://b/job", "logs": "gs://b/job/logs", "model": "gs://b/job/model",
        "sources": ["AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR", "AIP_MODEL_DIR"],
    }  # fmt: skip
    text = doctor.diagnosis_text(seen)
    assert any("not written to a URL" in note for note in seen["notes"])
    assert "by         AIP_CHECKPOINT_DIR, AIP_TENSORBOARD_LOG_DIR, AIP_MODEL_DIR" in text
    for words in ("worker 1, rank 2 of 3", "Vertex AI", "another process evaluates", "gs://b/job/logs"):
        assert words in text


def test_a_mistake_is_told_and_everything_else_too():
    seen = diagnose(TF_CONFIG="{", AIP_MODEL_DIR="gs://b/m/")
    assert seen["task"] is None and seen["directories"]["model"] == "gs://b/m"
    [problem] = seen["problems"]
    assert "TF_CONFIG is not JSON" in problem
    assert f"problem: {problem}" in doctor.diagnosis_text(seen)


def test_what_is_set_and_not_used_is_named():
    both = tf_config({"worker": ["a:1", "b:1"]}, "worker") | {"CTL_WORKERS": ADDRESSES}
    assert diagnose(**both)["also_set"] == ["CTL_WORKERS"]
    assert "CTL_WORKERS (not used)" in doctor.diagnosis_text(diagnose(**both))


def test_many_workers_are_not_all_listed():
    workers = [f"w{i}:1" for i in range(30)]
    text = doctor.diagnosis_text(diagnose(**tf_config({"worker": workers}, "worker", 29)))
    assert "w7:1 and 22 more" in text and "w8:1" not in text and "address    w29:1" in text


def test_names_without_an_address_are_a_note_and_a_taken_port_is_a_mistake():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        mine = f"localhost:{taken.getsockname()[1]}"
        cluster = {"worker": [mine, "nobody.invalid:1"]}
        seen = doctor.diagnose(tf_config(cluster, "worker"), network=True)
    assert any("'nobody.invalid' cannot be resolved yet" in note for note in seen["notes"])
    [problem] = seen["problems"]
    assert f"this task's address {mine} is in use" in problem


def test_a_directory_that_cannot_be_written_to_is_a_mistake(tmp_path):
    (tmp_path / "file").touch()
    seen = diagnose(AIP_CHECKPOINT_DIR=f"{tmp_path}/file/checkpoints/", AIP_MODEL_DIR=f"{tmp_path}/new")
    assert len(seen["problems"]) == 1 and "is not writable" in seen["problems"][0]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("installed", "words"), [
    ({"tensorflow": "2.15.1"}, "TensorFlow is 2.15.1"), ({}, "TensorFlow is not installed"),
])  # fmt: skip
def test_a_tensorflow_that_will_not_do(installed, words, monkeypatch):
    def version(name):
        if name not in installed:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert any(words in problem for problem in diagnose()["problems"])


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(as_json):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    good = environment(**tf_config({"worker": addresses}, "worker", 1))
    bad = environment(**tf_config({"worker": addresses}, "worker", 2))
    for env, code in ((good, 0), (bad, 2)):
        words = [sys.executable, "-m", "ctl", "doctor", *(["--json"] if as_json else [])]
        done = subprocess.run(
            words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert ("index 0 to 1" in done.stdout) == bool(code)
        if as_json:
            assert len(json.loads(done.stdout)["problems"]) == bool(code)
