"""Parsing of hosts and discovery scripts, the ssh command, and the allocation of workers."""

import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import TIMEOUT_SECS
from ctl.errors import UsageError
from ctl.launch import discovery, hosts, remote_entry, ssh
from ctl.launch.cli import build_allocation, parse_launch
from ctl.launch.discovery import parse_discovery, run_discovery
from ctl.launch.host_allocation import PORT_OFFSET, DiscoveredAllocation, HostAllocation, LocalAllocation
from ctl.launch.hosts import Host, select_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import is_alive
from polling import wait_until

FUZZ = settings(deadline=None)
PIECES = st.sampled_from(
    ["host1", "10.0.0.7", ":", ",", "@", "-", "--", ".", "2", "0", "99999999999", " ", "\n", "me",
     "::1", "é", "$(x)", "localhost", "1.2.3.4.5", "256.1.1.1", "#", "\0", "²", "-oProxyCommand=x"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=8).map("".join))


def one_line_message(error):
    """Returns the message of an error after a check that it is one readable line."""
    text = str(error)
    assert text and "\n" not in text and "Traceback" not in text and len(text) < 900
    return text


@FUZZ
@given(TEXTS)
def test_any_list_of_hosts_is_parsed_or_refused(text):
    try:
        parsed = hosts.parse_hosts(text)
    except UsageError as e:
        assert "expected" in one_line_message(e) or "list it once" in one_line_message(e)
        return
    assert parsed and all(1 <= h.slots <= hosts.MAX_WORKERS for h in parsed)
    for host in parsed:
        assert host.target.isascii() and not host.target.startswith("-")
        assert set(host.target) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_@")
        assert "_" not in host.address and shlex.quote(host.address) == host.address
    assert hosts.parse_hosts(hosts.format_hosts(parsed)) == parsed


@FUZZ
@given(st.lists(TEXTS, max_size=5).map("\n".join), st.integers(-20, 3), TEXTS)
def test_any_output_of_a_discovery_script_is_hosts_or_a_problem(out, returncode, err):
    result = parse_discovery("./hosts.sh", returncode, out, err)
    assert bool(result.hosts) != bool(result.problem)
    if result.problem:
        assert "./hosts.sh" in one_line_message(result.problem)


@FUZZ
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [f"--{name}" for name in vars(parse_launch(["--", "true"])[0])] + ["-H"]
            ),
            st.tuples(
                st.sampled_from([f"--{n}=" for n in vars(parse_launch(["--", "true"])[0])]),
                st.one_of(
                    st.sampled_from(
                        ["0", "-1", "1", "nan", "inf", "1e999", "1e5", "٣", "9" * 5000, "true",
                         "h1:2,h2", "localhost", "127.0.0.1", "/", "", "3"]
                    ),
                    st.text(max_size=10),
                ),
            ).map("".join),
            TEXTS,
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_options_are_an_allocation_or_refused(arguments):
    arguments = [a for a in arguments if a not in ("--help", "-h", "--")]
    try:
        options, command = parse_launch([*arguments, "--", "true"])
        allocation = build_allocation(options)
    except UsageError as e:
        one_line_message(e)
        return
    kinds = (LocalAllocation, HostAllocation, DiscoveredAllocation)
    assert command == ["true"] and isinstance(allocation, kinds)


@pytest.mark.parametrize(
    ("text", "error_message"),
    [
        ("", "'' is not a host"),
        ("host1,", "'' is not a host"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("host;reboot", "'host;reboot' is not a host"),
        ("host_1", "'host_1' is not a host"),
        ("300.1.1.1", "'300.1.1.1' is not a host"),
        ("1.2.3", "'1.2.3' is not a host"),
        ("-me@host1", "has the user '-me'"),
        ("host1:0", "has '0' slots; expected a whole number from 1"),
        ("host1:two", "has 'two' slots"),
        ("host1:²", "has '²' slots"),
        ("host1:2,HOST1:3", "the host 'HOST1' is listed twice; list it once with all its slots: HOST1:5"),
        ("host1:1000,host2:1000", "2000 slots were requested; expected at most 1024"),
    ],
)
def test_a_wrong_host_is_refused(text, error_message):
    with pytest.raises(UsageError) as raised:
        hosts.parse_hosts(text)
    assert error_message in str(raised.value)


def test_hosts_are_parsed():
    assert hosts.parse_hosts("host1:2, me@a-b.example.org,10.0.0.7:3") == [
        Host("host1", 2), Host("me@a-b.example.org", 1), Host("10.0.0.7", 3),
    ]  # fmt: skip
    assert hosts.parse_host_lines(["# today", "", "host1:2  ", "host2"]) == [
        Host("host1", 2),
        Host("host2"),
    ]


def test_this_machine_is_recognized_by_its_names_and_addresses():
    host_name = socket.gethostname()
    names = ("localhost", "127.0.0.1", host_name, host_name.upper())
    assert all(Host(name).is_local for name in names)
    assert not any(Host(name).is_local for name in ("192.0.2.1", "elsewhere", f"me@{host_name}"))


@pytest.mark.parametrize(
    ("line", "error_message"),
    [
        ("-H h1:2 --workers=2", "--workers cannot be combined with -H: the slots of the hosts determine"),
        ("-H h1 --ps=1", "--ps cannot be combined with -H: a job on several machines has workers only"),
        ("-H h1 --chief", "--chief cannot be combined with -H"),
        ("-H h1 --evaluator", "--evaluator cannot be combined with -H"),
        ("-H h1 --host_discovery=/bin/true", "-H cannot be combined with --host_discovery"),
        ("-H h1 --min_workers=1", "--min_workers=1 requires --host_discovery=SCRIPT"),
        ("--workers=3 --min_workers=1", "--min_workers=1 requires --host_discovery=SCRIPT"),
        ("--max_workers=3", "--max_workers=3 requires --host_discovery=SCRIPT"),
        ("--host_discovery=/bin/true --workers=2", "--workers cannot be combined with --host_discovery"),
        ("--host_discovery=/nowhere/x", "'/nowhere/x' cannot be run; expected the path"),
        ("--host_discovery=/bin/true --min_workers=3 --max_workers=2", "--min_workers=3 is greater than"),
        ("-H localhost:2,h1:2", "other machines cannot connect to this machine as 'localhost'"),
        ("-H h1:2 --port=65535", "--port=65535 is too high for 2 workers"),
        ("--host=a:b", "--host='a:b' is not an address"),
        ("--max_restarts=-1", "received '-1'; expected a whole number from 0"),
        ("--heartbeat_timeout_secs=nan", "received 'nan'; expected seconds from 0"),
        ("--startup_timeout_secs=-3", "received '-3'; expected seconds from 0"),
        ("--backoff_secs=inf", "received 'inf'; expected seconds from 0"),
        ("--max_log_mib=-1", "received '-1'; expected MiB"),
        ("--workers=99999", "received '99999'; expected a whole number from 1 to 1024"),
    ],
)
def test_unusable_options_are_refused(line, error_message):
    with pytest.raises(UsageError) as raised:
        build_allocation(parse_launch([*line.split(), "--", "true"])[0])
    assert error_message in one_line_message(raised.value)


def test_the_ssh_command_contains_two_paths_and_no_input_of_the_user(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/it's a/python")
    command = ssh.ssh_command("h1")
    assert command[0] == "ssh" and command[-3:-1] == ["--", "h1"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= set(command)
    assert shlex.split(command[-1]) == ["exec", "/it's a/python", remote_entry.__file__]


@pytest.mark.parametrize("path", ["/a\\b/python", "/a!/python", "/a\nb/python"])
def test_a_path_that_login_shells_read_differently_is_refused(monkeypatch, path):
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(UsageError, match="cannot be passed to the login shell of h1"):
        ssh.ssh_command("h1")


def test_a_remote_process_inherits_only_path_and_pythonpath(monkeypatch):
    monkeypatch.setenv("A_SECRET", "of mine")
    monkeypatch.setenv("PYTHONPATH", "/my code")
    monkeypatch.setenv("PATH", "/my bin:/bin")
    assert ssh.remote_environ({"TF_CONFIG": "{}"}) == {
        "PATH": "/my bin:/bin", "PYTHONPATH": "/my code", "TF_CONFIG": "{}", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("ssh") is None, reason="requires ssh")
def test_the_real_ssh_accepts_its_options():
    """-G prints the settings without a connection."""
    command = ssh.ssh_command("me@h1")
    settings_of_ssh = subprocess.run(
        [*command[: command.index("-T")], "-G", *command[command.index("-T") : -1]],
        capture_output=True, text=True, timeout=TIMEOUT_SECS, check=True,
    ).stdout.splitlines()  # fmt: skip
    expected = {"batchmode yes", "stricthostkeychecking true", "user me", "serveraliveinterval 5"}
    assert expected <= set(settings_of_ssh)


def test_a_name_that_does_not_resolve_is_named_and_not_this_machine():
    with pytest.raises(UsageError, match=r"host name 'elsewhere\.invalid' cannot be resolved"):
        hosts.resolve_addresses([Host("localhost"), Host("elsewhere.invalid")])
    names = ["192.0.2.1", "elsewhere.invalid"]
    assert hosts.resolve_addresses(list(map(Host, names))) == names


def test_hosts_on_this_machine_only_get_free_ports_on_loopback():
    allocation = HostAllocation([Host("localhost", 2)]).place_processes()
    assert not allocation.remote and len(set(allocation.tasks[0].tasks["worker"])) == 2
    assert all(a.startswith("127.0.0.1:") for a in allocation.tasks[0].tasks["worker"])


def test_after_a_port_conflict_remote_workers_get_other_ports():
    allocation = HostAllocation([Host("h1", 2)], port=2222)
    assert list(allocation.place_processes().remote) == ["h1:2222", "h1:2223"]
    shifted = [f"h1:{2222 + PORT_OFFSET + i}" for i in range(2)]
    assert list(allocation.place_processes(shift=1).remote) == shifted


def test_the_first_slots_are_selected():
    hosts_with_slots = [Host("a", 2), Host("b", 2), Host("c", 1)]
    assert select_slots(hosts_with_slots, None) == hosts_with_slots
    assert select_slots(hosts_with_slots, 3) == [Host("a", 2), Host("b", 1)]
    assert select_slots(hosts_with_slots, 2) == [Host("a", 2)]


def write_script(tmp_path, text):
    path = tmp_path / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "error_message"),
    [
        ("echo oops >&2; exit 3", "failed: exit code 3, oops"),
        ("kill -9 $$", "failed: signal 9"),
        ("exit 0", "printed no host"),
        ("echo 'no:such:thing'", "printed an invalid line: 'no:such:thing' has"),
        ("head -c 1000000 /dev/urandom", "printed an invalid line"),
    ],
)
def test_the_error_of_a_failing_discovery_script_is_described(tmp_path, text, error_message):
    assert error_message in one_line_message(run_discovery(write_script(tmp_path, text)).problem)


def test_a_hanging_discovery_script_is_killed_with_its_child_processes(tmp_path):
    hanging = write_script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    result = run_discovery(hanging, timeout_secs=3.0)
    assert "did not end within 3 s" in result.problem
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert discovery.DISCOVERY_TIMEOUT_SECS == 30


def test_a_discovery_script_gets_no_shell_and_no_arguments(tmp_path):
    assert run_discovery(write_script(tmp_path, 'echo "h$#:2"')).hosts == [Host("h0", 2)]
    assert "cannot be run" in run_discovery("/bin/echo h1").problem
