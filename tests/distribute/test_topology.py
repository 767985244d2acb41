"""Topology as a frozen object that is read from the environment once."""

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


def config(task_type: str, index: int) -> str:
    return json.dumps({"cluster": TASKS, "task": {"type": task_type, "index": index}})


def test_the_topology_is_one_frozen_object():
    topology = detection.read_topology({"TF_CONFIG": config("worker", 1)})
    assert (topology.num_workers, topology.worker_index, topology.address) == (3, 2, "c:1")
    assert topology.workers == ("a:1", "b:1", "c:1") and topology.tasks["ps"] == ("d:1",)
    assert set(topology.without_servers().tasks) == {"chief", "worker"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.task_index = 0


@pytest.mark.parametrize(("task_type", "is_chief", "evaluates"), [
    ("chief", True, False), ("worker", False, False), ("ps", False, False), ("evaluator", False, True),
])  # fmt: skip
def test_one_process_writes_shared_files(task_type, is_chief, evaluates):
    topology = detection.read_topology({"TF_CONFIG": config(task_type, 0)})
    assert (topology.is_chief, topology.evaluates) == (is_chief, evaluates)
    trains = task_type in ("chief", "worker")
    tasks_without_servers = {k: tuple(TASKS[k]) for k in ("chief", "worker")} if trains else topology.tasks
    assert topology.without_servers().tasks == tasks_without_servers


def test_a_trainer_does_not_read_the_environment_again(monkeypatch, tmp_path):
    trainer = Small(strategy="mirrored", model_dir=tmp_path, intervals=every_step(), writers=[])
    topology = trainer.topology
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 0))
    trainer.train(2)
    trainer.export("weights")
    assert trainer.topology is topology and trainer.step == 2 and (tmp_path / "checkpoints").is_dir()


def test_a_strategy_keeps_its_topology(monkeypatch):
    topology = Topology(has_evaluator=True, ends_with_chief=True, platform="somewhere")
    strategy = ctl.make_strategy("one_device", topology=topology)
    monkeypatch.setenv("TF_CONFIG", "{")  # must not be read
    strategy_topology = topology_of(strategy)
    assert (
        strategy_topology.has_evaluator
        and strategy_topology.ends_with_chief
        and strategy_topology.platform == "somewhere"
    )


def test_the_topology_of_a_foreign_strategy_is_read_from_the_environment(monkeypatch):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert topology_of(strategy) == Topology(num_replicas=2, num_local_replicas=2)
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 0))
    assert topology_of(strategy).evaluates
