"""Settings and data that elastic training does not support are refused with the value and the fix."""

import types

import ctl
import pytest
import tensorflow as tf
from ctl.config import Config
from ctl.data import pipeline
from ctl.data.batches import Batches
from ctl.distribute.topology import Topology
from ctl.elastic import requirements
from ctl.elastic.membership import ElasticTopology
from ctl.errors import UsageError
from ctl.step.gradient_settings import Gradients

TF_CONFIG = Topology({"worker": ("a:1", "b:2")}, "worker", 0).tf_config()


@pytest.fixture
def launched(monkeypatch):
    """The environment of a worker of `ctl launch --workers=1:3`."""
    monkeypatch.setenv("CTL_ELASTIC", "1:3")
    monkeypatch.setenv("CTL_HVD_RENDEZVOUS", "127.0.0.1:1")
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_the_launcher_requests_elastic_training(monkeypatch, launched):
    assert requirements.is_requested(Config())
    assert requirements.check_settings(Config()) == (1, 3)
    monkeypatch.delenv("CTL_ELASTIC")
    assert not requirements.is_requested(Config())
    assert requirements.is_requested(Config(elastic="1:3"))


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "parameter_server"}, {"strategy": "mirrored"}, {"communication": "ring"},
        {"communication": "nccl"}, {"communication": "mpi"}, {"sync_every": 4}, {"jit_compile": "step"},
        {"mode": "eval"}, {"on_nonfinite": "rollback"}, {"max_secs": 60.0}, {"data_position": "iterator"},
        {"num_virtual_devices": 2}, {"devices": ("cpu:0",)}, {"check_collectives": True},
        {"fast_dev_run": True}, {"tpu": "local"}, {"variable_partitioner": "max_shards:2"},
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_settings_are_refused(launched, settings):
    ((name, value),) = settings.items()
    with pytest.raises(UsageError) as error:
        requirements.check_settings(Config(**settings))
    assert str(error.value).startswith(f"{name} is {value!r}; expected ")
    assert "Leave it out, or start a fixed number" in str(error.value)


def test_a_program_without_launcher_is_refused(monkeypatch):
    monkeypatch.delenv("CTL_HVD_RENDEZVOUS", raising=False)
    monkeypatch.delenv("CTL_ELASTIC", raising=False)
    with pytest.raises(UsageError, match="elastic is '1:3', but no launcher .* --workers=1:3"):
        requirements.check_settings(Config(elastic="1:3"))


@pytest.mark.parametrize("value", ["3", "0:2", "3:2", "1:", "1:2:3", "1:1025", "a:b"])
def test_invalid_limits_are_refused(launched, value):
    with pytest.raises(UsageError, match=f"elastic is '{value}'; expected MIN:MAX"):
        requirements.check_settings(Config(elastic=value))


def test_other_limits_than_those_of_the_launcher_are_refused(launched):
    assert requirements.check_settings(Config(elastic="1:3")) == (1, 3)
    with pytest.raises(UsageError, match="the launcher was started with --workers=1:3"):
        requirements.check_settings(Config(elastic="2:3"))


def test_a_list_of_workers_in_the_environment_is_refused(monkeypatch, launched):
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    with pytest.raises(UsageError, match="the environment lists 2 workers"):
        requirements.check_settings(Config())


def test_gpus_are_refused(monkeypatch, launched):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["/gpu:0"])
    with pytest.raises(UsageError, match="this worker has 1 GPUs"):
        requirements.check_settings(Config())


class PartsTrainer(ctl.Trainer):
    def train_data_fn(self, context):
        """Not called."""


def batches(**values):
    dataset = tf.data.Dataset.range(3)
    defaults = {"steps": 3, "has_unknown_end": False, "steps_per_epoch": 3.0, "mode": "indexed"}
    return Batches(iterator=iter(dataset), description="numbers", **{**defaults, **values})


def task(method=None, **settings):
    methods = {} if method is None else {method.__name__: method}
    return types.SimpleNamespace(methods=methods, gradients=Gradients(**settings))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((task(PartsTrainer().train_data_fn), batches()), "train_data_fn; expected train_data"),
        ((task(wire_dtype="int8"), batches()), "wire_dtype='int8'"),
        ((task(on_nonfinite="rollback"), batches()), "a rollback"),
        ((task(), batches(is_per_worker=True)), "shards by worker; expected global batches"),
        ((task(), batches(has_unknown_end=True)), "unknown length; expected assert_cardinality"),
        ((task(), batches(steps_per_epoch=None)), "a step without data"),
    ],
)
def test_unsupported_trainers_and_data_are_refused(launched, arguments, expected):
    with pytest.raises(UsageError, match=expected):
        requirements.check_run(Config(), *arguments, can_roll_back=False)


def test_callbacks_that_roll_back_are_refused(launched):
    requirements.check_run(Config(), task(), batches(), can_roll_back=False)
    with pytest.raises(UsageError, match="a rollback to a checkpoint"):
        requirements.check_run(Config(), task(), batches(), can_roll_back=True)


def test_compiled_keras_models_are_refused(launched):
    trainer = object.__new__(ctl.KerasTrainer)
    with pytest.raises(UsageError, match=r"a ctl.KerasTrainer; expected a subclass of ctl.Trainer"):
        requirements.check_run(Config(), task(trainer.train_step), batches(), can_roll_back=False)


class OpensDataError(Exception):
    """Raised by `train_data`."""


def test_any_number_of_workers_can_share_a_batch():
    """The numbers of workers that an elastic job will have are not known at its start."""

    def train_data(batch_size):
        raise OpensDataError

    def open_data(topology):
        strategy = tf.distribute.get_strategy()
        pipeline.open_train_data(train_data, strategy, topology, global_batch_size=8, seed=0)

    ranks = types.SimpleNamespace(size=3, rank=0, addresses=("a:1", "b:2", "c:3"))
    with pytest.raises(OpensDataError):
        open_data(ElasticTopology(types.SimpleNamespace(ranks=ranks)))
    with pytest.raises(UsageError, match="3 replicas cannot split evenly"):
        open_data(Topology(num_replicas=3))
