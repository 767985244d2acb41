"""Parameter servers without processes: options, roles, errors, data sharing and waiting."""

import json
import logging

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.data.arrays import from_arrays
from ctl.distribute.parameter_servers import Partition, closures, wait_for, watch_chief
from ctl.distribute.platforms import detection
from ctl.distribute.strategies import STRATEGY_NAMES
from ctl.distribute.strategy_kind import has_parameter_servers, strategy_name
from ctl.metrics.protocol import Progressed
from ctl.parameter_server import worker_data
from ctl.parameter_server.rounds import Watch
from ctl.supervision.signals import Interruption

TASKS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


def set_config(monkeypatch, tasks, task_type="chief"):
    text = json.dumps({"cluster": tasks, "task": {"type": task_type, "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)


def test_the_strategy_has_a_name_and_other_strategies_have_no_servers():
    assert "parameter_server" in STRATEGY_NAMES
    assert not has_parameter_servers(tf.distribute.get_strategy())
    assert strategy_name(tf.distribute.get_strategy()) == "default"


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [*(("parameter_server", k) for k in TASKS), *(("auto", k) for k in TASKS if k != "ps")],
)
def test_a_job_without_one_of_the_three_kinds_is_refused(monkeypatch, strategy, missing):
    tasks = {k: v for k, v in TASKS.items() if k != missing}
    set_config(monkeypatch, tasks, next(iter(tasks)))
    with pytest.raises(ctl.UsageError, match=rf'expected one chief, workers and ps. Add "{missing}"'):
        ctl.make_strategy(strategy)


def test_a_job_without_tf_config_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ctl.UsageError, match="got a TF_CONFIG with no tasks"):
        ctl.make_strategy("parameter_server")


def test_an_evaluator_beside_servers_works_on_its_own(monkeypatch):
    set_config(monkeypatch, {**TASKS, "evaluator": ["127.0.0.1:4"]}, "evaluator")
    assert strategy_name(ctl.make_strategy("parameter_server")) == "default"


def test_named_devices_are_refused(monkeypatch):
    set_config(monkeypatch, TASKS)
    with pytest.raises(ctl.UsageError, match="got devices cpu:0.*CUDA_VISIBLE_DEVICES"):
        ctl.make_strategy("parameter_server", devices=["cpu:0"])


def test_servers_are_removed_from_the_topology_on_request(monkeypatch):
    set_config(monkeypatch, TASKS)
    assert "ps" not in detection.read_topology().without_servers().tasks
    assert detection.read_topology().tasks["ps"] == ("127.0.0.1:3",)


def test_a_partitioner_without_servers_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ctl.UsageError, match="belongs to strategy 'parameter_server'"):
        ctl.make_strategy("default", variable_partitioner="fixed_shards:2")


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("", Partition()),
        ("min_size:256K", Partition(min_bytes=256 * 1024)),
        ("min_size:7", Partition(min_bytes=7)),
        ("max_shards:2", Partition(max_shards=2)),
        ("max_shards:2,min_size:1M", Partition(max_shards=2, min_bytes=1024**2)),
        ("fixed_shards:3", Partition(fixed_shards=3)),
    ],
)
def test_a_partitioner_is_read(text, partition):
    assert Partition.parse(text) == partition


@pytest.mark.parametrize(
    "text", ["min", "min_size:", "max_shards:0", "fixed_shards:2K", "shards:2", "2", "max_shards:-1"]
)
def test_a_partitioner_that_is_none_is_refused(text):
    with pytest.raises(ctl.UsageError, match="expected 'min_size:256K', 'max_shards:2'"):
        Partition.parse(text)


def test_fixed_shards_go_alone():
    with pytest.raises(ctl.UsageError, match="fixed_shards excludes"):
        Partition.parse("fixed_shards:2,min_size:1K")


@pytest.mark.parametrize(
    ("text", "shape", "parts"),
    [
        ("fixed_shards:3", [9, 4], [3, 1]),
        ("min_size:1K", [1024, 4], [4, 1]),  # 16 KB, at most one part per server
        ("min_size:8K", [1024, 4], [2, 1]),
        ("max_shards:2,min_size:1K", [1024, 4], [2, 1]),
        ("min_size:1M", [1024, 4], [1, 1]),
    ],
)
def test_variables_are_cut_as_the_partitioner_specifies(text, shape, parts):
    cut = Partition.parse(text).partitioner(num_servers=4)
    assert cut(shape=tf.TensorShape(shape), dtype=tf.float32) == parts
    assert Partition().partitioner(4) is None


@pytest.mark.parametrize(
    ("steps", "length", "workers", "expected"),
    [(100, None, 2, (2, 100)), (100, 7, 2, (15, 7)), (1, None, 2, (1, 1)), (1, 7, 4, (1, 1)),
     (3, 50, 2, (2, 3)), (8, 4, 2, (2, 4))],
)  # fmt: skip
def test_calls_hold_all_steps_and_keep_every_worker_busy(steps, length, workers, expected):
    assert closures(steps, length, workers) == expected
    assert expected[0] * expected[1] >= steps


class FakeProbe:
    """Probe that returns the answers in turn, then repeats the last one. Each sleep advances the clock."""

    def __init__(self, *answers):
        self.answers, self.time_secs, self.num_probes = list(answers), 0.0, 0

    def probe(self, address):
        self.num_probes += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def sleep(self, secs):
        self.time_secs += secs

    def arguments(self):
        return {"probe": self.probe, "sleep": self.sleep, "clock": lambda: self.time_secs}


def test_a_server_leaves_after_several_refusals_in_a_row_once_the_chief_was_seen():
    probe = FakeProbe(False, False, True, False, False, True, True, False)
    watch_chief("a:1", **probe.arguments())
    assert probe.num_probes == 7 + 4
    assert probe.time_secs < 15


def test_a_server_waits_for_a_late_chief_and_logs_it_once(caplog):
    probe = FakeProbe(*[False] * 100, True, False)
    with caplog.at_level(logging.WARNING, "ctl"):
        watch_chief("a:1", **probe.arguments())
    assert [r.getMessage() for r in caplog.records] == [
        "The chief at a:1 does not accept connections yet; still waiting."
    ]


def test_the_chief_names_the_tasks_it_waits_for(caplog):
    probe = FakeProbe(*[False] * 80, True)
    with caplog.at_level(logging.WARNING, "ctl"):
        wait_for({"worker 0": "a:1", "ps 0": "b:1"}, **probe.arguments())
    assert caplog.records[0].getMessage() == "Waiting for worker 0 at a:1, ps 0 at b:1."
    absent = FakeProbe(False)
    with pytest.raises(ctl.PeerLostError, match=r"Not started within 600 s: worker 0 at a:1"):
        wait_for({"worker 0": "a:1"}, **absent.arguments())


def test_progress_is_reported_and_a_stall_warned_of_once_and_a_signal_ends_the_wait(caplog):
    time_secs, step_value, notes, signals = [0.0], [5], [], Interruption()
    watch = Watch(lambda: step_value[0], signals, notes.append, lambda: time_secs[0])
    with caplog.at_level(logging.WARNING, "ctl"):
        for time_secs[0] in np.arange(0.0, 80.0, 0.5):
            assert not watch()
    assert notes == [Progressed(5)]
    assert len(caplog.records) == 1 and "since step 5; still waiting" in caplog.text
    step_value[0], time_secs[0] = 6, 90.0
    signals._handle(15, None)
    assert watch()
    assert notes[-1] == Progressed(6)


@pytest.mark.parametrize("start", [0, 12])
def test_workers_share_the_batches_of_the_endless_order(start):
    data = from_arrays(np.arange(40), 4)

    def take(share, count):
        batches = data.replica_batches(
            seed=3, start=start, total=None, replicas=range(1), num_replicas=1, share=share
        )
        return [b.tolist() for b in batches.take(count).as_numpy_iterator()]

    expected = take((0, 1), 12)
    assert [take((w, 3), 4) for w in range(3)] == [expected[w::3] for w in range(3)]


def test_a_dataset_with_python_code_cannot_be_sent_and_random_operations_can():
    dataset = tf.data.Dataset.range(9).batch(3)
    with pytest.raises(ctl.UsageError, match=r"calls Python code.*Write ctl\.from_arrays"):
        worker_data._serialize(dataset.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)))
    noisy = dataset.shuffle(3).map(lambda x: tf.random.uniform([]))
    assert worker_data._serialize(noisy).dtype == tf.string
