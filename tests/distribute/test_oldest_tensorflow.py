"""Differences between the oldest TensorFlow that pyproject.toml allows and newer ones."""

import os
import re
import sys

import pytest
from conftest import ROOT
from ctl.io import log_filter
from ctl.tensorflow_patches import coordination_service
from oldest_versions import constraints

MODULES = [f"tensorflow.{package}tsl.protobuf.coordination_config_pb2" for package in ("compiler.xla.", "")]


@pytest.mark.parametrize("existing_module", MODULES)
def test_heartbeats_use_the_message_module_of_this_version(existing_module, monkeypatch):
    messages = coordination_service._config_module()
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, messages if name == existing_module else None)
    assert coordination_service._config_module() is messages
    assert messages.CoordinatedJob(name="worker", num_tasks=2).num_tasks == 2


@pytest.mark.parametrize("log_prefix", [
    "2026-11-25 15:14:25.755242: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:479] ",  # 2.16
    "E0000 00:00:1764083665.755242   14463 cuda_dnn.cc:8310] ",  # 2.17, 2.18
])  # fmt: skip
def test_messages_of_repeated_registrations_are_not_printed(log_prefix, capfd):
    reason = "factory: Attempting to register factory for plugin when one has already been registered"
    lines = [f"{log_prefix}Unable to register {name} {reason}\n" for name in ("cuFFT", "cuDNN", "cuBLAS")]
    with log_filter.quiet():
        os.write(2, "".join([*lines, f"{log_prefix}Unable to open a file\n"]).encode())
    assert capfd.readouterr().err == f"{log_prefix}Unable to open a file\n"


def test_the_oldest_environment_has_the_oldest_version_of_every_library():
    text = (ROOT / "pyproject.toml").read_text()
    requirements = constraints(text)
    numpy = re.search(r'"numpy>=([0-9.]+)"', text)[1]
    assert f"numpy=={numpy}.*" in requirements and len(requirements) == len(
        {c.partition("==")[0] for c in requirements}
    )
    names = {c.partition("==")[0] for c in requirements}
    assert {"tensorflow", "tensorboard", "absl-py", "tf_keras", "pyyaml"} <= names
    assert not {"pytest", "mypy", "setuptools"} & names
