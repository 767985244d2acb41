"""Data from the tf.data service, with real servers in this process."""

import logging

import ctl
import pytest
import tensorflow as tf
from ctl.data import dataset_traits, sharding
from ctl.distribute.topology import Topology
from small_models import Small

service = tf.data.experimental.service


@pytest.fixture(scope="module")
def address():
    """Address of a dispatcher with two workers."""
    dispatcher = service.DispatchServer()
    host_and_port = dispatcher.target.partition("://")[2]
    workers = [service.WorkerServer(service.WorkerConfig(host_and_port)) for _ in range(2)]
    yield dispatcher.target
    del workers


class FromService(Small):
    """A trainer that counts its examples."""

    def __init__(self, service_address, **options):
        super().__init__(global_batch_size=4, **options)
        self.service_address = service_address

    def train_data(self, batch_size):
        dataset = tf.data.Dataset.range(40).batch(batch_size, drop_remainder=True)
        policy = service.ShardingPolicy.DYNAMIC
        return dataset.apply(service.distribute(processing_mode=policy, service=self.service_address))

    def train_step(self, batch):
        return {"value": tf.cast(batch, tf.float32)}


def test_the_service_is_recognized(address):
    traits = dataset_traits.Traits(FromService(address).train_data(4))
    assert traits.reads_service and "tf.data service" in traits.unordered_reason
    assert not dataset_traits.Traits(tf.data.Dataset.range(4)).reads_service


def test_training_works_and_a_resume_is_warned_of(address, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ctl"):
        trainer = FromService(address, model_dir=str(tmp_path), writers=[])
        trainer.train(3)
    assert trainer.step == 3
    assert "resumed exactly only if" in caplog.text and "tf.data service" in caplog.text
    resumed = FromService(address, model_dir=str(tmp_path), writers=[])
    resumed.train(5)
    assert resumed.step == 5


@pytest.mark.parametrize("data_position", ["skip", "iterator"])
def test_a_position_that_cannot_be_exact_is_refused(data_position, address):
    trainer = FromService(address, data_position=data_position, writers=[])
    with pytest.raises(ctl.UsageError, match=f"data_position is '{data_position}'.*tf.data service"):
        trainer.train(2)


def test_several_workers_that_read_all_data_are_refused_unless_each_has_its_own(address):
    topology = Topology({"worker": ("a:1", "b:1")}, "worker", 0)
    dataset = FromService(address).train_data(4)
    with pytest.raises(ctl.UsageError, match=r'tf.data service.*ctl.shard\(dataset, "off"\)'):
        sharding.check_can_be_shared(dataset, "train_data", topology)
    sharding.check_can_be_shared(ctl.shard(dataset, "off"), "train_data", topology)
