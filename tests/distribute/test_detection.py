"""Topology of a process from TF_CONFIG, and one sentence for every mistake."""

import json

import ctl
import pytest
from ctl.distribute.platforms.detection import normalise, read_topology
from ctl.distribute.topology import Topology

WORKERS = ["a:1", "b:2"]


def config(cluster=None, task_type="worker", index=0, **extra_keys):
    task = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **extra_keys})}


@pytest.mark.parametrize("environ", [
    {}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"TF_CONFIG": "{}"}, config({}), config(None),
])  # fmt: skip
def test_without_a_cluster_the_process_is_alone(environ):
    topology = read_topology(environ)
    assert (topology.num_workers, topology.worker_index, topology.is_chief) == (1, 0, True)
    assert topology.address is None
    normalise(topology, environ)
    assert environ.get("TF_CONFIG") in (None, *environ.values())


@pytest.mark.parametrize(
    ("task_type", "index", "rank", "chief", "address"),
    [("chief", 0, 0, True, "c:9"), ("worker", 0, 1, False, "a:1"), ("worker", 1, 2, False, "b:2")],
)
def test_the_chief_comes_first_and_workers_follow(task_type, index, rank, chief, address):
    for name in ("chief", "master"):
        cluster = {"worker": WORKERS, name: ["c:9"]}
        task = name if task_type == "chief" else task_type
        topology = read_topology(config(cluster, task, index))
        assert (topology.num_workers, topology.worker_index, topology.is_chief) == (3, rank, chief)
        assert topology.address == address
        assert topology.task_type == task_type


def test_without_a_chief_worker_0_is_chief():
    assert read_topology(config({"worker": WORKERS})).is_chief
    second = read_topology(config({"worker": WORKERS}, index=1))
    assert (second.worker_index, second.is_chief, second.address) == (1, False, "b:2")


def test_an_index_may_be_a_string():
    assert read_topology(config({"worker": WORKERS}, index="1")).worker_index == 1


def test_without_servers_drops_parameter_servers_and_evaluators():
    cluster = {"worker": WORKERS, "ps": ["p:1", "p:2"], "evaluator": ["e:1"], "chief": ["c:1"]}
    topology = read_topology(config(cluster, "worker", 1)).without_servers()
    assert set(topology.tasks) == {"chief", "worker"} and topology.num_workers == 3
    ps = read_topology(config(cluster, "ps", 1))
    assert ps.address == "p:2" and not ps.is_chief


@pytest.mark.parametrize("cluster", [{"worker": WORKERS}, {"worker": WORKERS, "evaluator": ["e:1"]}])
def test_an_evaluator_need_not_be_in_the_cluster_and_is_never_chief(cluster):
    topology = read_topology(config(cluster, "evaluator"))
    assert (topology.task_type, topology.is_chief) == ("evaluator", False)


def test_a_normalised_cluster_is_written_for_tensorflow():
    environ = config({"worker": WORKERS, "master": ["c:1"], "ps": ["p:1"]}, "master", "0")
    normalise(read_topology(environ).without_servers(), environ)
    assert json.loads(environ["TF_CONFIG"]) == {
        "cluster": {"worker": WORKERS, "chief": ["c:1"]}, "task": {"type": "chief", "index": 0},
    }  # fmt: skip
    normalised = read_topology(environ)
    assert normalised == read_topology({"TF_CONFIG": normalised.tf_config()})
    assert isinstance(normalised, Topology)


CLUSTER = {"worker": WORKERS}
MISTAKES = {
    "not JSON": ({"TF_CONFIG": "{cluster: 1}"}, r"not JSON.*'\{cluster: 1\}'"),
    "misspelt cluster": (
        {"TF_CONFIG": json.dumps({"clusters": CLUSTER, "task": {"type": "worker", "index": 1}})},
        "unknown key 'clusters'.*Did you mean 'cluster'"),
    "misspelt task": (
        {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "Task": {"type": "worker", "index": 1}})},
        "unknown key 'Task'.*Did you mean 'task'"),
    "unknown key": (config(CLUSTER, zebra=1), "unknown key 'zebra'; expected only cluster, task"),
    "a task alone": (
        {"TF_CONFIG": json.dumps({"task": {"type": "worker", "index": 1}})}, "has task, but no cluster"),
    "an environment alone": ({"TF_CONFIG": '{"environment": "cloud"}'}, "has environment, but no cluster"),
    "a list": ({"TF_CONFIG": "[1]"}, r"TF_CONFIG is '\[1\]'; expected an object"),
    "cluster is a list": (config(["a:1"]), r"cluster is \['a:1'\]; expected lists of addresses"),
    "cluster is a string": (config("a:1"), r"cluster is 'a:1'"),
    "unknown type": (config({"server": WORKERS}), "task type 'server'; expected one of chief, worker"),
    "no addresses": (config({"worker": []}), r"has \[\] for 'worker'"),
    "addresses as a string": (config({"worker": "a:1"}), "has 'a:1' for 'worker'"),
    "no port": (config({"worker": ["a"]}), r"'a' for worker\[0\].*port"),
    "port 0": (config({"worker": ["a:1", "a:0"]}), r"'a:0' for worker\[1\]"),
    "port too large": (config({"worker": ["a:65536"]}), "'a:65536'"),
    "port not a number": (config({"worker": ["a:http"]}), "'a:http'"),
    "no host": (config({"worker": [":80"]}), "':80'"),
    "address not a string": (config({"worker": [80]}), r"80 for worker\[0\]"),
    "address twice": (config({"worker": ["a:1", "a:1"]}), r"a:1 to both worker\[0\] and worker\[1\]"),
    "address of two types": (config({"chief": ["a:1"], **CLUSTER}), r"a:1 to both chief\[0\] and worker"),
    "master and chief": (config({"master": ["m:1"], "chief": ["c:1"]}), "both 'master' and 'chief'"),
    "two chiefs": (config({"chief": WORKERS}), "2 chiefs; expected one"),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, "task None; expected type and index"),
    "task without index": (
        {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker"}})}, "expected type and"),
    "unknown task type": (config(CLUSTER, "boss"), "task type is 'boss'; expected one of"),
    "index too large": (config(CLUSTER, index=2), r"worker 2, but its cluster lists 2 .*0 to 1"),
    "index negative": (config(CLUSTER, index=-1), "index is -1; expected a whole number >= 0"),
    "index a fraction": (config(CLUSTER, index=0.5), "index is 0.5"),
    "index true": (config(CLUSTER, index=True), "index is True"),
    "index a string": (config(CLUSTER, index="first"), "index is 'first'"),
    "index null": (config(CLUSTER, index=None), "index is None"),
    "type not in the cluster": (config(CLUSTER, "chief"), "chief 0, but its cluster lists no 'chief'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_every_mistake_is_one_sentence_that_names_it(name):
    environ, message = MISTAKES[name]
    with pytest.raises(ctl.UsageError, match=message) as caught:
        read_topology(environ)
    assert "\n" not in str(caught.value) and "TF_CONFIG" in str(caught.value)


OTHER_MISTAKES = {
    "CLUSTER_SPEC misspelt": (
        {"CLUSTER_SPEC": json.dumps({"clusters": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}})},
        "CLUSTER_SPEC has the unknown key 'clusters'.*'cluster'"),
    "CLUSTER_SPEC without a cluster": (
        {"CLUSTER_SPEC": '{"environment": "cloud"}'}, "CLUSTER_SPEC has environment, but no cluster"),
    "CTL_WORKERS misspelt": (
        {"CTL_WORKER": "a:1,b:1", "JOB_COMPLETION_INDEX": "1"}, "did you mean CTL_WORKERS"),
    "CTL_TASK_INDEX misspelt": ({"CTL_WORKERS": "a:1,b:1", "CTL_TASK_INDX": "1"}, "mean CTL_TASK_INDEX"),
    "index without addresses": ({"CTL_TASK_INDEX": "1"}, "CTL_TASK_INDEX is 1, but CTL_WORKERS is not set"),
    "rank without size": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
    "host without hosts": ({"SM_CURRENT_HOST": "algo-2"}, "SM_HOSTS is not set"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OTHER_MISTAKES))
def test_a_platform_variable_that_is_misspelt_or_incomplete_is_refused(name):
    environ, message = OTHER_MISTAKES[name]
    with pytest.raises(ctl.UsageError, match=message):
        read_topology(environ)


def test_keys_that_platforms_and_tensorflow_use_are_accepted():
    extra_keys = {
        "environment": "cloud",
        "rpc_layer": "grpc",
        "session_master": "",
        "job": {},
        "trial": "1",
    }
    assert read_topology(config(CLUSTER, index=1, **extra_keys)).worker_index == 1
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}
    task = {"type": "workerpool1", "index": 0}
    spec = {"cluster": pools, "task": task, "environment": "cloud", "new_of_the_platform": 1}
    assert read_topology({"CLUSTER_SPEC": json.dumps(spec)}).worker_index == 1
    assert read_topology({"CTL_HVD_WORKER": "x", "CTL_STARTUP_TIMEOUT_SECS": "5"}).num_workers == 1
