"""The command line of `ctlrun`: names, values and refusals of options."""

import importlib.util
import re

import pytest
from conftest import ROOT
from ctl.errors import UsageError
from ctl.launch import config_file, horovodrun_cli, hosts
from ctl.launch import horovodrun_options as options
from ctl.launch.horovodrun_options import FLAGS, parse_ctlrun
from ctl.launch.host_allocation import allocate_ranks
from ctl.launch.hosts import Host
from ctl.launch.rank_environment import option_environ
from ctl.launch.rank_job import ranks_of_task

# The options of horovodrun 0.28.1: one short name of each option and its long names.
HOROVODRUN = re.findall(
    r"\S+",
    """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
--network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
--no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise
--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
--blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp
--binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp
--log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun -h --help
""",
)


def environ_of(*arguments):
    """Returns the environment variables for the options."""
    return option_environ(parse_ctlrun([*arguments, "python"])[0])


def error_message_of(*arguments):
    """Returns the error message of `ctlrun` for a refused command line."""
    with pytest.raises(UsageError) as raised:
        parsed_options, command = parse_ctlrun(list(arguments))
        if horovodrun_cli.requests_elastic_job(parsed_options):
            horovodrun_cli.parse_elastic_limits(parsed_options)
        host_list = horovodrun_cli.parse_host_options(parsed_options)
        allocate_ranks(host_list, parsed_options["num_proc"], parsed_options["nics"])
        horovodrun_cli.check_options(parsed_options, command)
    return str(raised.value)


def test_the_options_are_those_of_horovodrun_and_three_of_ctl():
    assert sorted(FLAGS) == sorted([*HOROVODRUN, "--as-horovod", "--bind_gpus", "--heartbeat-timeout"])


@pytest.mark.parametrize("arguments", [
    ["-np", "2"], ["--num-proc", "2"], ["--num-proc=2"], ["-np=2"], ["--verbose", "-np", "2", "--"],
], ids=" ".join)  # fmt: skip
def test_the_command_starts_at_the_first_argument_that_is_no_option(arguments):
    parsed_options, command = parse_ctlrun([*arguments, "python", "train.py", "--np", "3", "-p", "--", "x"])
    assert parsed_options["num_proc"] == 2 and parsed_options["ssh_port"] is None
    assert command == ["python", "train.py", "--np", "3", "-p", "--", "x"]


def test_a_command_after_two_hyphens_may_begin_with_one():
    assert parse_ctlrun(["-np", "2", "--", "-m", "pytest"])[1] == ["-m", "pytest"]
    assert "`-- python -m ...`" in error_message_of("-np", "2", "--", "-m", "pytest")


@pytest.mark.parametrize(("arguments", "variable", "value"), [
    (["--fusion-threshold-mb", "32"], "HOROVOD_FUSION_THRESHOLD", str(32 * 2**20)),
    (["--fusion-threshold-mb", "0"], "HOROVOD_FUSION_THRESHOLD", "0"),
    (["--cycle-time-ms", "3.5"], "HOROVOD_CYCLE_TIME", "3.5"),
    (["--cache-capacity", "0"], "HOROVOD_CACHE_CAPACITY", "0"),
    (["--timeline-filename", "/t.json"], "HOROVOD_TIMELINE", "/t.json"),
    (["--timeline-mark-cycles"], "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    (["--no-timeline-mark-cycles"], "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    (["--no-stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "1"),
    (["--no-stall-check", "--stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "0"),
    (["--stall-check-warning-time-seconds", "5"], "HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
    (["--stall-check-shutdown-time-seconds", "9"], "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "9"),
    (["--log-level", "debug"], "HOROVOD_LOG_LEVEL", "DEBUG"),
    (["--log-hide-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
    (["--log-with-timestamp"], "HOROVOD_LOG_HIDE_TIME", "0"),
    (["--start-timeout", "90"], "HOROVOD_START_TIMEOUT", "90"),
    (["--elastic-timeout", "90"], "HOROVOD_ELASTIC_TIMEOUT", "90"),
    (["--network-interface", "eth0", "--network-interfaces", "eth1,ib0"], "NCCL_SOCKET_IFNAME",
     "eth0,eth1,ib0"),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_an_option_becomes_the_variable_of_horovod(arguments, variable, value):
    assert environ_of(*arguments) == {variable: value}


def test_without_options_no_variable_is_set():
    assert environ_of() == {}


def test_options_without_effect_are_named_once_in_one_line():
    line = "--autotune --autotune-log-file x --tcp --tcp --no-torus-allreduce"
    parsed_options, _ = parse_ctlrun([*line.split(), "--log-level", "INFO", "python"])
    ignored_names = "--log-level --torus-allreduce --autotune --autotune-log-file --tcp"
    assert " ".join(options.ignored_option_names(parsed_options)) == ignored_names
    assert options.ignored_option_names(parse_ctlrun(["--gloo", "--disable-cache", "x"])[0]) == []


@pytest.mark.parametrize(("arguments", "error_message"), [
    (["--num-prc", "2", "x"], "'--num-prc' is not an option of ctlrun; did you mean --num-proc?"),
    (["-npp", "2", "x"], "did you mean -np?"),
    (["-hostfil", "f", "x"], "did you mean -hostfile?"),
    (["-np", "x"], "-np received 'x'; expected a whole number from 1 to 1024"),
    (["-np", "0", "x"], "-np received '0'"),
    (["-np"], "-np requires N after it"),
    (["--verbose=1", "x"], "--verbose takes no value"),
    (["--log-level", "LOUD", "x"], "expected one of TRACE, DEBUG"),
    (["--blacklist-cooldown-range", "5"], "requires SECS SECS after it"),
    (["--cycle-time-ms", "-1", "x"], "expected a number from 0"),
    (["python", "-np", "2"], "-np is missing; expected the number of processes, such as -np 2"),
    (["-np", "2"], "no command was given; expected e.g. ctlrun -np 2"),
    (["-np", "2", "no-such-program"], "'no-such-program' was not found"),
    (["-np", "2", "train.py"], "run a script with `python train.py`"),
    (["-np", "3", "-H", "localhost:2", "sh"], "-np 3 is greater than the 2 slots of localhost:2"),
    (["-np", "2", "-H", "a:1", "-hostfile", "f", "sh"], "Omit one of them"),
    (["-np", "2", "-H", "a b:1", "sh"], "'a b' is not a host"),
    (["-np", "2", "-hostfile", "/no/file", "sh"], "--hostfile /no/file cannot be read"),
    (["-np", "2", "--jsrun", "sh"], "--jsrun was given, but jsrun is not supported; use --mpi"),
    (["-np", "2", "--max-np", "3", "sh"], "--max-np requires an elastic job"),
    (["-np", "1", "--min-np", "2", "sh"], "--min-np 2 is greater than -np 1"),
    (["-np", "3", "--min-np", "2", "--max-np", "2", "sh"], "-np 3 is greater than --max-np 2"),
    (["-np", "1", "--network-interfaces", "nope0", "sh"], "'nope0' has no IPv4 address"),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_an_unusable_option_is_refused_with_a_hint(arguments, error_message):
    assert error_message in error_message_of(*arguments)


@pytest.mark.parametrize("arguments", [["--jsrun", "-np", "1", "sh"], ["--nope"], []], ids=" ".join)
def test_a_refusal_is_one_line_and_exit_code_2(arguments, capsys):
    assert horovodrun_cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(r"ctlrun: [^\n]+\n", err)


def test_hosts_take_ranks_in_their_order_and_surplus_hosts_stay_empty(monkeypatch):
    monkeypatch.setattr(hosts, "_address_towards", lambda far: "10.0.0.9")
    allocation = allocate_ranks([Host("127.0.0.1", 2), Host("far1", 2), Host("far2", 2)], 3)
    assert list(allocation.hosts) == ["127.0.0.1", "127.0.0.1", "far1"]
    assert [allocation.remote_host(task) for task in allocation.tasks] == [None, None, "far1"]
    assert [ranks_of_task(allocation, task).cross_size for task in allocation.tasks] == [2, 1, 2]
    addresses = allocation.tasks[2].tasks["worker"]
    assert addresses == allocation.tasks[0].tasks["worker"]
    names = [address.rpartition(":")[0] for address in addresses]
    assert names == ["10.0.0.9", "10.0.0.9", "far1"]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert len(set(ports)) == 3 and 20000 <= ports[2] <= 30000


def test_without_np_every_slot_is_used():
    assert len(allocate_ranks([Host("127.0.0.1", 2), Host("127.0.0.2", 1)], None).tasks) == 3


def test_a_config_file_sets_options_and_the_command_line_overrides_it():
    parsed_options, _ = parse_ctlrun(["--cache-capacity", "5", "--stall-check", "python"])
    content = {
        "controller": "gloo",
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 5, "cache_capacity": 9,
                   "hierarchical_allreduce": True},
        "autotune": {"enabled": True, "log_file": "a.log"},
        "timeline": {"filename": "t.json", "mark_cycles": True},
        "stall_check": {"enabled": False, "warning_time_seconds": 120},
        "library_options": {"num_nccl_streams": 2, "mpi_threads_disable": None},
        "logging": {"level": "INFO", "with_timestamp": False},
    }  # fmt: skip
    config_file.add_config_file(parsed_options, "/dev/null", lambda _: content)
    assert option_environ(parsed_options) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20), "HOROVOD_CYCLE_TIME": "5.0",
        "HOROVOD_CACHE_CAPACITY": "5", "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120", "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }  # fmt: skip
    assert "--autotune" in options.ignored_option_names(parsed_options)


@pytest.mark.parametrize(("content", "error_message"), [
    ({"params": "x"}, "`params: x`; expected a mapping with keys"),
    ({"params": {"cycle_time_ms": "x"}}, "`params: cycle_time_ms`"),
    ({"timeline": {"mark_cycles": "yes"}}, "expected true or false"),
    ({"controller": "jsrun"}, "expected 'gloo' or 'mpi'"),
    (["params"], "contains a list"),
], ids=str)  # fmt: skip
def test_an_unusable_config_file_is_refused(content, error_message):
    with pytest.raises(UsageError) as raised:
        config_file.add_config_file(options.no_options(), "/dev/null", lambda _: content)
    assert error_message in str(raised.value)


def test_unknown_keys_of_a_config_file_are_named_and_ignored(capsys):
    parsed_options = options.no_options()
    content = {"parms": {}, "params": {"cycle": 1, "fusion_threshold_mb": 32}}
    config_file.add_config_file(parsed_options, "/dev/null", lambda _: content)
    stderr = capsys.readouterr().err
    assert "ignoring the section 'parms' of" in stderr
    assert "ignoring `params: cycle` in" in stderr
    assert parsed_options["fusion_threshold_mb"] == 32


def test_a_config_file_is_yaml(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("params:\n  fusion_threshold_mb: 1\n  cycle_time_ms: 0.5\n")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "yaml", None)
        with pytest.raises(UsageError, match=r"tf-ctl\[deploy\]"):
            config_file.add_config_file(options.no_options(), str(path))
    pytest.importorskip("yaml")
    parsed_options = options.no_options()
    config_file.add_config_file(parsed_options, str(path))
    assert parsed_options["fusion_threshold_mb"] == 1 and parsed_options["cycle_time_ms"] == 0.5
    path.write_text("params: [")
    with pytest.raises(UsageError, match="is not valid YAML"):
        config_file.add_config_file(parsed_options, str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        config_file.add_config_file(parsed_options, str(tmp_path / "none"))


def test_check_build_lists_the_installed_packages(capsys):
    import keras
    import tensorflow as tf

    assert horovodrun_cli.main(["-cb"]) == 0
    out = capsys.readouterr().out
    assert f"[X] TensorFlow {tf.__version__}" in out and f"[X] Keras {keras.__version__}" in out
    assert "[ ] NCCL" in out and "[X] TCP" in out and "[ ] PyTorch" in out
    assert ("[X] MPI" in out) == (importlib.util.find_spec("mpi4py") is not None)
    assert horovodrun_cli.package_version(("no-such-package",)) == ""


def test_help_names_every_option_and_version_is_that_of_ctl(capsys):
    assert horovodrun_cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in FLAGS:
        assert name in out
    assert horovodrun_cli.main(["-v"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "pyproject.toml").read_text()
