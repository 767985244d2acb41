"""Each platform's variables, as its documentation or source shows them, become one cluster."""

import json

import pytest
from ctl.distribute.platforms.detection import also_set, apply_settings, normalise, read_topology
from ctl.errors import UsageError

POOLS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
}
CHIEF, WORKERS = POOLS["workerpool0"], POOLS["workerpool1"]
PS, EVALUATOR = ["cmle-training-workerpool2-ab-0:2222"], ["cmle-training-workerpool3-ab-0:2222"]


def spec(pool, index=0, job=None, **extra_pools):
    """Vertex AI's CLUSTER_SPEC."""
    task = {"type": pool, "index": index, "trial": "1"}
    content = {"cluster": {**POOLS, **extra_pools}, "environment": "cloud", "task": task}
    return {"CLUSTER_SPEC": json.dumps(content | ({"job": job} if job is not None else {}))}


def tf_config(cluster, task_type, index=0, **extra_pools):
    task = {"type": task_type, "index": index, "trial": "1", "cloud": "ab"}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **extra_pools})}


@pytest.mark.parametrize(("pool", "index", "task_type", "rank"), [
    ("workerpool0", 0, "chief", 0), ("workerpool1", 0, "worker", 1), ("workerpool1", 1, "worker", 2),
])  # fmt: skip
def test_vertex_ai_by_cluster_spec_alone(pool, index, task_type, rank):
    environ = spec(pool, index, workerpool2=PS, workerpool3=EVALUATOR)
    topology = read_topology(environ)
    assert (topology.task_type, topology.task_index, topology.worker_index) == (task_type, index, rank)
    assert topology.without_servers().tasks == {"chief": tuple(CHIEF), "worker": tuple(WORKERS)}
    assert topology.address == POOLS[pool][index]
    assert (topology.is_chief, topology.has_evaluator, topology.ends_with_chief) == (rank == 0, True, True)
    assert read_topology(environ).tasks["ps"] == tuple(PS)
    normalise(topology.without_servers(), environ)
    assert read_topology(environ).tasks == topology.without_servers().tasks
    assert "evaluator" not in environ["TF_CONFIG"]


def test_vertex_ai_s_parameter_server_and_evaluator():
    pools = {"workerpool2": PS, "workerpool3": EVALUATOR}
    assert read_topology(spec("workerpool2", **pools)).task_type == "ps"
    topology = read_topology(spec("workerpool3", **pools))
    assert (topology.task_type, topology.is_chief) == ("evaluator", False)


def test_a_job_of_one_replica_is_one_process():
    environ = {"CLUSTER_SPEC": json.dumps({
        "cluster": {"workerpool0": CHIEF}, "environment": "cloud",
        "task": {"type": "workerpool0", "index": 0, "trial": "1"},
    })}  # fmt: skip
    topology = read_topology(environ)
    assert (topology.num_workers, topology.is_chief, topology.platform) == (1, True, "Vertex AI")


def reduction_server_job(
    pools_key="worker_pool_specs", container_key="container_spec", image_key="image_uri"
):
    server = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
    return {pools_key: [{}, {}, {container_key: {image_key: server}}]}


@pytest.mark.parametrize("job", [
    reduction_server_job(), reduction_server_job("workerPoolSpecs", "containerSpec", "imageUri"),
    json.dumps(reduction_server_job()),
    {"jobSpec": reduction_server_job()},
])  # fmt: skip
def test_the_reduction_server_is_no_parameter_server(job):
    cluster_spec = spec("workerpool1", job=job, workerpool2=PS)
    assert "ps" not in read_topology(cluster_spec).tasks
    cluster = {"chief": CHIEF, "worker": WORKERS, "ps": PS}
    both = {**cluster_spec, **tf_config(cluster, "worker", environment="cloud")}
    assert "ps" not in read_topology(both).tasks
    inside = tf_config(cluster, "worker", environment="cloud", job=job)
    assert "ps" not in read_topology(inside).tasks
    assert any("Reduction Server" in note for note in read_topology(both).notes)


def test_vertex_ai_s_evaluator_shows_in_cluster_spec_only():
    environ = tf_config({"chief": CHIEF, "worker": WORKERS}, "chief", environment="cloud")
    assert not read_topology(environ).has_evaluator
    topology = read_topology({**environ, **spec("workerpool0", workerpool3=EVALUATOR)})
    assert topology.has_evaluator and topology.ends_with_chief and topology.platform == "Vertex AI"
    evaluator = tf_config({"chief": CHIEF, "worker": WORKERS}, "evaluator", environment="cloud")
    assert read_topology(evaluator).task_type == "evaluator"


def test_an_old_runtime_writes_master():
    topology = read_topology(tf_config({"master": CHIEF, "worker": WORKERS}, "master", environment="cloud"))
    assert (topology.task_type, topology.is_chief, topology.ends_with_chief) == ("chief", True, True)


def test_kubeflow_lists_the_evaluator():
    cluster = {"chief": ["j-chief-0.ns.svc:2222"], "worker": ["j-worker-0.ns.svc:2222"],
               "evaluator": ["j-evaluator-0.ns.svc:2222"]}  # fmt: skip
    environ = tf_config(cluster, "chief", environment="cloud") | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    topology = read_topology(environ)
    assert topology.has_evaluator and topology.ends_with_chief and topology.platform == "Kubeflow TFJob"
    assert "evaluator" not in topology.without_servers().tasks
    assert not read_topology(tf_config({**cluster}, "chief")).ends_with_chief
    del cluster["chief"]  # then worker 0's end is the job's
    topology = read_topology(tf_config(cluster, "worker", environment="cloud"))
    assert (topology.is_chief, topology.has_evaluator, topology.ends_with_chief) == (True, True, True)


def test_kubeflow_lists_task_types_without_replicas():
    cluster = {"worker": ["a:1", "b:1"], "ps": [], "evaluator": []}
    topology = read_topology(tf_config(cluster, "worker", 1, environment="cloud"))
    assert (topology.num_workers, topology.has_evaluator) == (2, False)


ADDRESSES = "train-0.train:2222,train-1.train:2222,train-2.train:2222"


@pytest.mark.parametrize("counter", ["JOB_COMPLETION_INDEX", "CTL_TASK_INDEX", "OMPI_COMM_WORLD_RANK"])
def test_listed_addresses_and_an_index(counter):
    environ = {"CTL_WORKERS": ADDRESSES, counter: "2"}
    topology = read_topology(environ)
    assert (topology.worker_index, topology.num_workers, topology.address) == (2, 3, "train-2.train:2222")
    assert not topology.has_evaluator and read_topology({**environ, "CTL_EVALUATOR": "1"}).has_evaluator
    assert counter in read_topology(environ).sources


def test_the_index_of_the_user_precedes_that_of_the_platform():
    environ = {"CTL_WORKERS": ADDRESSES, "JOB_COMPLETION_INDEX": "2", "CTL_TASK_INDEX": "1"}
    assert read_topology(environ).worker_index == 1


def test_each_pod_of_an_indexed_job_without_addresses_trains_alone():
    environ = {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert read_topology(environ).num_workers == 1
    [note] = read_topology(environ).notes
    assert "trains alone" in note and "CTL_WORKERS" in note
    assert read_topology({**environ, **mpi(1)}).num_workers == 2  # processes within one such pod


def test_sagemaker():
    environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    topology = read_topology(environ)
    assert (topology.worker_index, topology.tasks) == (1, {"worker": ("algo-1:8890", "algo-2:8890")})
    assert read_topology(environ | {"CTL_PORT": "3000"}).address == "algo-2:3000"
    assert read_topology({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}).num_workers == 1


def test_sagemaker_s_master_of_parameter_servers():
    cluster = {"master": ["algo-1:2222"], "worker": ["algo-2:2222"], "ps": ["algo-1:2223", "algo-2:2223"]}
    assert read_topology(tf_config(cluster, "master")).task_type == "chief"


def test_tf_config_precedes_other_variables():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2",
             "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    assert read_topology(slurm).num_workers == 2
    both = slurm | tf_config({"worker": ["a:1", "b:1", "c:1"]}, "worker", 2)
    assert read_topology(both).num_workers == 3
    assert also_set(both, read_topology(both)) == ["SLURM_PROCID"]
    assert read_topology(slurm | {"TF_CONFIG": "{}"}).num_workers == 1


def mpi(rank, size=2, local=2, **variables):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(local), "PMIX_NAMESPACE": "host.1", **variables}  # fmt: skip


def test_mpi_on_one_machine_agrees_on_separate_ports():
    first, second = read_topology(mpi(0)), read_topology(mpi(1))
    assert first.tasks == second.tasks and second.worker_index == 1
    assert len({*first.tasks["worker"]}) == 2
    other = read_topology(mpi(0, PMIX_NAMESPACE="host.2"))
    assert not set(other.tasks["worker"]) & set(first.tasks["worker"])
    assert read_topology(mpi(0, size=1, local=1)).num_workers == 1


def test_mpi_within_a_slurm_job_takes_its_hosts():
    hosts = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[9-11]", "SLURM_TASKS_PER_NODE": "2,1(x2)"}
    topology = read_topology(mpi(2, size=4, local=1, SLURM_PROCID="0", **hosts))
    assert [a.split(":")[0] for a in topology.tasks["worker"]] == ["n9", "n9", "n10", "n11"]
    assert topology.worker_index == 2


def test_mpi_over_several_machines_needs_their_addresses():
    with pytest.raises(UsageError, match="-x CTL_WORKERS=host1:2222,host2:2222"):
        read_topology(mpi(1, size=4, local=2))
    listed = {"CTL_WORKERS": "a:1,a:2,b:1,b:2"}
    assert read_topology(mpi(1, size=4, local=2) | listed).address == "a:2"
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_SIZE is 3"):
        read_topology(mpi(1, size=3, local=1) | listed)


def test_mpich_and_intel_mpi():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert (read_topology(environ).worker_index, read_topology(environ).num_workers) == (1, 2)
    step = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    by_srun = {"PMI_RANK": "1", "PMI_SIZE": "2", **step}
    assert (read_topology(by_srun).platform, read_topology(by_srun).address[:3]) == ("Slurm", "n2:")


def test_horovodrun_on_one_machine():
    environ = {f"HOROVOD_{name}": value for name, value in {
        "RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "GLOO_RENDEZVOUS_PORT": "4711",
    }.items()}  # fmt: skip
    assert (read_topology(environ).worker_index, read_topology(environ).num_workers) == (1, 2)


@pytest.mark.parametrize(("environ", "sentence"), [
    ({"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC is not JSON"),
    ({"CLUSTER_SPEC": "[]"}, "expected an object"),
    ({"CLUSTER_SPEC": '{"cluster": ["a"]}'}, "expected addresses by pool"),
    ({"CLUSTER_SPEC": '{"cluster": {"workerpool9": ["a:1"]}}'}, "the pool 'workerpool9'"),
    ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'}, "expected type and index"),
    (spec("workerpool1", 2), "its cluster lists 2 of this type"),
    (spec("workerpool0", workerpool1=["a"]), "CLUSTER_SPEC's cluster has 'a' for worker[0]"),
    ({"CTL_WORKERS": "a:1,b:1"}, "Set CTL_TASK_INDEX to 0"),
    ({"CTL_WORKERS": "a:1,b", "CTL_TASK_INDEX": "0"}, "has 'b' for task 1"),
    ({"CTL_WORKERS": "a:1,a:1", "CTL_TASK_INDEX": "0"}, "gives a:1 to several tasks"),
    ({"CTL_WORKERS": "a:1,b:1", "CTL_TASK_INDEX": "2"}, "CTL_TASK_INDEX is 2, but"),
    ({"CTL_WORKERS": "a:1,b:1", "JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is 'x'"),
    ({"SM_HOSTS": "algo-1"}, "SM_HOSTS is 'algo-1'"),
    ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"}, "SM_CURRENT_HOST is 'c'"),
    ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "CTL_PORT": "70000"}, "CTL_PORT is 70000"),
    ({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "CTL_PORT": "0"}, "CTL_PORT is 0"),
    (mpi(0, CTL_PORT="65535"), "has '127.0.0.1:65536' for task 1"),
    (spec(["x"]), "the pool ['x']"),
    (tf_config({}, "worker") | {"TF_CONFIG": '{"sparseCluster": {"worker": {"0": "a:1"}}}'},
     "Leave enableDynamicWorker out"),
    (mpi(2), "OMPI_COMM_WORLD_RANK is 2, but OMPI_COMM_WORLD_SIZE is 2"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(environ, sentence):
    with pytest.raises(UsageError) as caught:
        read_topology(environ)
    assert sentence in str(caught.value)


def test_a_task_gets_its_share_of_the_gpus_unless_slurm_gave_it():
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2",
               "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2",
               "SLURM_JOB_GPUS": "0,1,2,3"}  # fmt: skip
    apply_settings(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    environ["CUDA_VISIBLE_DEVICES"] = "0"
    apply_settings(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"
