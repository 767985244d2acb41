"""Topology from Slurm's variables: host order, tasks per host, and ports that jobs do not share."""

import os
import socket

import pytest
from ctl.distribute import own_port, startup_barrier
from ctl.distribute.platforms.detection import read_topology
from ctl.distribute.platforms.slurm import host_names, tasks_of_hosts
from ctl.errors import UsageError
from ctl.hvd import process
from hypothesis import given
from hypothesis import strategies as st

JOB_ID = str(os.getpid())  # gives the same test in another process other ports


def step(number=0, hosts="n[9-11]", per_host="1(x3)", count=3, job=JOB_ID, **extra_variables):
    """Returns the variables that srun sets for one task."""
    return {"SLURM_PROCID": str(number), "SLURM_NTASKS": str(count), "SLURM_JOB_ID": job,
            "SLURM_STEP_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": per_host,
            **extra_variables}  # fmt: skip


@pytest.mark.parametrize(("text", "names"), [
    ("n1", ["n1"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[08-10,3],gpu-a", ["n08", "n09", "n10", "n3", "gpu-a"]),
    ("b,a", ["b", "a"]),
    ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ("n[1,3]-ib.cluster", ["n1-ib.cluster", "n3-ib.cluster"]),
])  # fmt: skip
def test_hosts_come_in_the_order_of_the_list(text, names):
    assert host_names(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[2-1]", "n[a-b]", "n[]", "", "a,,b"])
def test_an_invalid_list_of_hosts_is_refused(text):
    with pytest.raises(UsageError, match="list of hosts"):
        host_names(text)


@given(st.lists(st.integers(0, 120), min_size=1, unique=True), st.integers(1, 4))
def test_ranges_and_single_numbers_are_the_same_hosts(numbers, width):
    text = f"n[{','.join(f'{i:0{width}d}' for i in numbers)}]"
    assert host_names(text) == [f"n{i:0{width}d}" for i in numbers]


@pytest.mark.parametrize(("text", "hosts", "counts"), [
    ("2(x3),1", 4, [2, 2, 2, 1]), ("4", 1, [4]), ("1,2", 2, [1, 2]),
])  # fmt: skip
def test_tasks_per_host(text, hosts, counts):
    assert tasks_of_hosts(text, hosts) == counts


@pytest.mark.parametrize(("text", "hosts"), [("2(x3)", 4), ("two", 1), ("2(x", 1), ("", 1)])
def test_tasks_that_do_not_fit_the_hosts_are_refused(text, hosts):
    with pytest.raises(UsageError, match="tasks per host"):
        tasks_of_hosts(text, hosts)


def test_tasks_are_ranks_in_blocks_of_a_host():
    topology = read_topology(step(3, per_host="2,1(x2)", count=4))
    assert [a.split(":")[0] for a in topology.tasks["worker"]] == ["n9", "n9", "n10", "n11"]
    assert (topology.worker_index, topology.is_chief, topology.platform) == (3, False, "Slurm")
    first, second = (int(a.split(":")[1]) for a in topology.tasks["worker"][:2])
    assert second == first + 1


def test_without_tasks_per_host_they_are_spread_evenly():
    environ = step(count=5)
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    hosts = [a.split(":")[0] for a in read_topology(environ).tasks["worker"]]
    assert hosts == ["n9", "n9", "n10", "n10", "n11"]


def test_a_task_whose_host_contradicts_its_number_is_refused():
    position = {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    assert read_topology(step(1, **position)).worker_index == 1
    with pytest.raises(UsageError, match="--distribution=block"):
        read_topology(step(1, hosts="n[1-2]", per_host="2(x2)", count=4, **position))


@pytest.mark.parametrize(("distribution", "hosts"), [
    ("block", "n1 n1 n1 n2"), ("block:cyclic", "n1 n1 n1 n2"), ("cyclic", "n1 n2 n1 n1"),
    ("cyclic:block", "n1 n2 n1 n1"), ("plane", "n1 n1 n2 n1"), ("cyclic:cyclic,Pack", "n1 n2 n1 n1"),
])  # fmt: skip
def test_the_order_of_tasks_is_that_of_the_distribution(distribution, hosts):
    distribution_variables = {"SLURM_DISTRIBUTION": distribution, "SLURM_DIST_PLANESIZE": "2"}
    tasks = [step(i, hosts="n[1-2]", per_host="3,1", count=4, **distribution_variables) for i in range(4)]
    topologies = [read_topology(task) for task in tasks]
    assert [a.split(":")[0] for a in topologies[0].workers] == hosts.split()
    assert (
        len({task_topology.workers for task_topology in topologies}) == 1
        and len(set(topologies[0].workers)) == 4
    )


@pytest.mark.parametrize("distribution", ["arbitrary", "plane"])
def test_every_task_refuses_an_unknown_order(distribution):
    for number, node_and_local_id in enumerate([("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]):
        position = dict(zip(("SLURM_NODEID", "SLURM_LOCALID"), node_and_local_id, strict=True))
        with pytest.raises(UsageError, match=rf"SLURM_DISTRIBUTION is '{distribution}'; expected block"):
            read_topology(step(number, "n[1-2]", "2(x2)", 4, SLURM_DISTRIBUTION=distribution, **position))


@given(st.integers(0, 10**7), st.integers(0, 40), st.integers(1, 20), st.sampled_from([1, 16, 40]))
def test_steps_of_a_job_never_share_a_port(job, number, distance, tasks):
    def ports(step_id):
        environ = step(hosts="n1", per_host=str(tasks + 1), count=tasks + 1, job=str(job))
        topology = read_topology(environ | {"SLURM_STEP_ID": str(step_id)})
        return {a.split(":")[1] for a in topology.workers}

    assert not ports(number) & ports(number + distance)


def test_a_port_in_use_is_tried_again_in_the_next_step_and_names_its_variable():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        chosen = read_topology(step(CTL_PORT=str(port)))
        with pytest.raises(UsageError, match=f"Port {port} .* is in use.*set CTL_PORT to") as caught:
            own_port.check_port_is_free(chosen)
        assert caught.value.exit_code == 2
    computed = read_topology(step())
    port = int(computed.address.rpartition(":")[2])
    with socket.socket() as server:
        server.bind(("", port))
        server.listen()
        with pytest.raises(UsageError, match=f"Port {port} .* other ports, or set CTL_PORT to") as caught:
            own_port.check_port_is_free(computed)
    assert caught.value.exit_code == 134 and "TF_CONFIG" not in str(caught.value)


def test_a_rank_of_ctl_hvd_and_the_start_of_workers_name_the_variable_too(monkeypatch):
    environ = step(hosts="127.0.0.1", per_host="2", count=2)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as server:
        server.bind(("", int(read_topology(environ).address.rpartition(":")[2])))
        server.listen()
        with pytest.raises(UsageError, match="other ports, or set CTL_PORT to") as caught:
            process.init()
        with pytest.raises(UsageError, match="other ports, or set CTL_PORT to"):
            startup_barrier.run_barrier(read_topology(environ), {}, 5.0)
    assert caught.value.exit_code == 134


@given(st.integers(0, 10**7), st.integers(1, 20), st.integers(1, 16), st.integers(1, 16))
def test_neighbouring_jobs_on_one_host_never_share_a_port(job, distance, tasks, other_tasks):
    def ports(number, tasks):
        environ = step(hosts="n1", per_host=str(tasks), count=tasks, job=str(number))
        topology = read_topology(environ).tasks.get("worker", ())
        return {int(a.split(":")[1]) for a in topology}

    own_ports = ports(job, tasks)
    assert not own_ports & ports(job + distance, other_tasks)
    assert all(15000 <= port < 32768 for port in own_ports)
    ports_of_40_tasks = ports(job, 40)
    assert not ports_of_40_tasks & ports(job + distance, 40) and max(ports_of_40_tasks, default=0) < 32768


def test_a_port_can_be_given():
    assert read_topology(step(CTL_PORT="5000")).address == "n9:5000"


def test_the_batch_script_is_one_process_and_a_note_names_srun():
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
              "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "1(x4)"}  # fmt: skip
    assert read_topology(script).num_workers == 1
    [note] = read_topology(script).notes
    assert "srun was not used" in note
    assert read_topology(script | {"SLURM_STEP_ID": "4294967291"}).num_workers == 1
    assert read_topology(script | {"SLURM_STEP_ID": "0"}).num_workers == 4
    assert read_topology({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}).num_workers == 1


@pytest.mark.parametrize("environ", [step(3), step(count=2), step("x"), step(count="two")])
def test_numbers_that_contradict_each_other_are_refused(environ):
    with pytest.raises(UsageError, match="SLURM_"):
        read_topology(environ)
