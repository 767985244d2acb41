"""The topology is read once and handed on: nobody looks at the environment again."""

import dataclasses
import json

import ctl
import pytest
import tensorflow as tf
from ctl.distribute.platforms import detection
from ctl.distribute.strategies import topology_of
from ctl.distribute.topology import Topology
from small_models import Small, every_step

TASKS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def config(kind: str, index: int) -> str:
    return json.dumps({"cluster": TASKS, "task": {"type": kind, "index": index}})


def test_it_is_one_frozen_object():
    found = detection.read_topology({"TF_CONFIG": config("worker", 1)})
    assert (found.num_workers, found.worker_index, found.address) == (3, 2, "c:1")
    assert found.workers == ("a:1", "b:1", "c:1") and found.tasks["ps"] == ("d:1",)
    assert set(found.without_servers().tasks) == {"chief", "worker"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.task_index = 0


@pytest.mark.parametrize(("kind", "chief", "evaluates"), [
    ("chief", True, False), ("worker", False, False), ("ps", False, False), ("evaluator", False, True),
])  # fmt: skip
def test_one_process_writes_shared_files(kind, chief, evaluates):
    found = detection.read_topology({"TF_CONFIG": config(kind, 0)})
    assert (found.is_chief, found.evaluates) == (chief, evaluates)
    assert found.without_servers().tasks == ({k: tuple(TASKS[k]) for k in ("chief", "worker")}
                                             if kind in ("chief", "worker") else found.tasks)  # fmt: skip


def test_a_trainer_does_not_read_the_environment_again(monkeypatch, tmp_path):
    trainer = Small(strategy="mirrored", model_dir=tmp_path, intervals=every_step(), writers=[])
    before = trainer.topology
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 0))
    trainer.train(2)
    trainer.export("weights")
    assert trainer.topology is before and trainer.step == 2 and (tmp_path / "checkpoints").is_dir()


def test_a_strategy_knows_what_it_was_made_from(monkeypatch):
    given = Topology(has_evaluator=True, ends_with_chief=True, platform="somewhere")
    strategy = ctl.make_strategy("one_device", topology=given)
    monkeypatch.setenv("TF_CONFIG", "{")  # is not looked at
    found = topology_of(strategy)
    assert found.has_evaluator and found.ends_with_chief and found.platform == "somewhere"


def test_a_strategy_that_somebody_else_made_is_read_from_the_environment(monkeypatch):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert topology_of(strategy) == Topology(num_replicas=2, num_local_replicas=2)
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 0))
    assert topology_of(strategy).evaluates
