"""The launcher without processes: command line, ports, tasks, logs, and the cause of a failure."""

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import types
from pathlib import Path

import pytest
from ctl import cli
from ctl.errors import UsageError
from ctl.launch import cli as launch_cli
from ctl.launch import log_files, monitor, output, process_tree
from ctl.launch.heartbeat_monitor import HeartbeatMonitor, Timeouts
from ctl.launch.host_allocation import RoleCounts, build_tasks
from ctl.launch.monitor import ForwardedSignals, Monitor
from ctl.launch.output import LogOutput
from ctl.launch.ports import free_ports
from ctl.launch.process import ProcessExit
from ctl.launch.terminal_text import TerminalText, read_tail
from ctl.version import __version__
from polling import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_SECS = 600


def worker_tasks(count=2):
    return build_tasks(RoleCounts(workers=count), "127.0.0.1")


class ScriptedGroup:
    """A fake process group. Each poll reports the next round of (task number, return code) pairs."""

    def __init__(self, *rounds, workers=2, **roles):
        self.tasks = build_tasks(RoleCounts(workers=workers, **roles), "127.0.0.1")
        self.running = tuple(self.tasks)
        self.exits = []
        self.rounds = list(rounds)
        self.started = []
        self.stopped = self.remote = ()

    def poll(self):
        for index, returncode in self.rounds.pop(0) if self.rounds else ():
            self.exits.append(ProcessExit(self.tasks[index], returncode, lived_secs=1.0))
            self.running = tuple(t for t in self.running if t != self.tasks[index])

    def restart(self, end):
        self.started.append(end.task.task_index)
        self.running = (*self.running, end.task)

    @property
    def failures(self):
        return [e for e in self.exits if e.returncode != 0]


def monitored(group):
    return Monitor(group, 30.0, ForwardedSignals(), chief=group.tasks[0], log_dir=Path("/nowhere")).wait()


def cause_of(*rounds, workers=2):
    cause = monitored(ScriptedGroup(*rounds, workers=workers)).cause
    assert cause is not None
    return cause.task.task_index, cause.exit_code


def test_free_ports_are_distinct_and_can_be_bound():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", port))


def test_a_host_of_another_machine_is_refused_with_a_hint():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.*--host=127\.0\.0\.1"):
        free_ports(1, "192.0.2.1")


def test_a_chief_is_one_process_more_and_the_first_task():
    tasks = build_tasks(RoleCounts(workers=2, chief=True), "127.0.0.1")
    assert [(t.task_type, t.task_index, t.worker_index) for t in tasks] == [
        ("chief", 0, 0),
        ("worker", 0, 1),
        ("worker", 1, 2),
    ]
    assert len({address for addresses in tasks[0].tasks.values() for address in addresses}) == 3


def test_the_first_failure_noticed_is_the_cause():
    assert cause_of([(1, 3)], [(0, 4)]) == (1, 3)


def test_of_two_dead_processes_the_one_that_lost_a_peer_is_not_the_cause():
    assert cause_of([(0, 134), (1, 3)]) == (1, 3)


def test_a_worker_that_aborts_after_losing_a_peer_is_not_the_cause():
    assert cause_of([(0, -signal.SIGABRT)], [], [(1, -signal.SIGKILL)]) == (1, 137)


def test_when_all_have_lost_a_peer_the_first_is_named():
    assert cause_of([(1, 134)], [(0, 134)]) == (1, 134)


@pytest.mark.parametrize(
    ("phase", "cause"), [("ended", (1, 1)), ("saving", (1, 1)), ("training", (0, 134)), (None, (0, 134))]
)
def test_a_process_that_reported_its_error_may_take_long_to_end(tmp_path, monkeypatch, phase, cause):
    monkeypatch.setattr(monitor, "_CAUSE_SECS", 0.0)
    group = ScriptedGroup([(0, 134)], [], [], [(1, 1)])
    heartbeats = HeartbeatMonitor(tmp_path, Timeouts())
    if phase:
        heartbeats.path(group.tasks[1]).write_text(json.dumps({"phase": phase}))
    first_failure = Monitor(group, 30.0, ForwardedSignals(), heartbeats, chief=group.tasks[0]).wait().cause
    assert (first_failure.task.task_index, first_failure.exit_code) == cause


def test_an_early_exit_with_0_is_no_failure():
    assert monitored(ScriptedGroup([(1, 0)], [(0, 0)])).cause is None


def test_a_worker_of_a_server_that_fails_repeatedly_is_not_restarted(monkeypatch, capsys):
    monkeypatch.setattr(monitor, "RESTART_PAUSE_SECS", (0.0, 0.0, 0.0))
    worker_0_fails = [(1, 3)]  # tasks: chief, worker 0, worker 1, ps
    group = ScriptedGroup(*[worker_0_fails] * 4, [(0, 0)], [(2, 0), (3, 1)], chief=True, ps=1)
    assert monitored(group).cause is None and group.started == [0, 0, 0]
    messages = capsys.readouterr().err.splitlines()
    assert [line for line in messages if "(3 of 3)" in line] == messages[2:3] and len(messages) == 4
    assert "worker 0 (job 1) ended with exit code 3 after 3 restarts; the job continues" in messages[3]


def test_a_worker_that_ends_when_the_chief_ends_is_not_restarted():
    group = ScriptedGroup([(1, 134)], [(0, 0)], [(2, 134), (3, 134)], chief=True, ps=1)
    assert monitored(group).cause is None and group.started == []


def test_a_parameter_server_that_ends_just_before_the_chief_is_no_failure():
    group = ScriptedGroup([(3, 1)], [(0, 0)], [(1, 0), (2, 0)], chief=True, ps=1)
    assert monitored(group).cause is None


def test_an_exit_is_described_as_in_a_shell():
    task = worker_tasks(1)[0]
    assert (str(ProcessExit(task, 3, 1.0)), ProcessExit(task, 3, 1.0).exit_code) == ("exit code 3", 3)
    assert (str(ProcessExit(task, -9, 1.0)), ProcessExit(task, -9, 1.0).exit_code) == ("SIGKILL", 137)
    assert str(ProcessExit(task, -63, 1.0)) == "signal 63"


def test_an_overwritten_line_keeps_its_last_state():
    text = TerminalText()
    assert text.feed(b"start\r\n10%\r20%") == b"start\n"
    assert text.feed(b"\r30%\r\nnext") == b"30%\n"
    assert text.flush() == b"next\n"
    assert text.flush() == b""


def test_escape_sequences_are_dropped_if_they_arrive_in_pieces():
    text = TerminalText()
    pieces = b"\x1b[?25l\x1b[1;32mgreen\x1b[0m \x1b]0;title\x07tab\tkept\x1b[K\b\x1b(B\n"
    text_without_escapes = b"".join(text.feed(pieces[i : i + 1]) for i in range(len(pieces)))
    assert text_without_escapes == b"green tab\tkept\n"


def test_a_progress_bar_of_any_length_needs_little_memory_and_one_line():
    text = TerminalText()
    for step in range(20_000):
        assert text.feed(b"\r\x1b[2Kstep %d" % step) == b""
        assert len(text._line) < 10_000
    assert text.feed(b"\n") == b"step 19999\n"


def test_a_line_without_an_end_is_passed_completely():
    text = TerminalText()
    assert text.feed(b"x" * 200_000) + text.flush() in (b"x" * 200_000, b"x" * 200_000 + b"\n")


def test_the_tail_is_the_last_lines_without_escapes(tmp_path):
    log = tmp_path / "job_1.log"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"".join(b"\x1b[1mline %d\n" % i for i in range(50)))
    assert read_tail(log, lines=3) == "line 47\nline 48\nline 49"
    assert read_tail(tmp_path / "none.log") == ""


def log_output(directory):
    """Returns (output of a process with its log on the console, task, descriptor to write to)."""
    task = worker_tasks(1)[0]
    copied_output = LogOutput(directory, [task])
    return copied_output, task, copied_output.open_writers(task)[0]


def test_the_copy_ends_when_all_writers_are_closed(tmp_path):
    copied_output, task, _ = log_output(tmp_path)
    copied_output.close_writers(task)
    copied_output.start()
    wait_until(lambda: not copied_output._streams)
    copied_output.finish()
    assert not copied_output._thread.is_alive()


def test_a_process_has_a_terminal_of_the_launcher_s_size(tmp_path, monkeypatch):
    test_end, console = os.openpty()
    monkeypatch.setattr(output, "_STDOUT", console)
    fcntl.ioctl(test_end, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    copied_output, _, writer = log_output(tmp_path)
    assert tuple(os.get_terminal_size(writer)) == (101, 33)
    copied_output.start()
    copied_output.finish()
    os.close(test_end)
    os.close(console)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_message_and_the_console_output_continues(tmp_path, capfd):
    (tmp_path / "job_0.log").symlink_to("/dev/full")
    copied_output, _, writer = log_output(tmp_path)
    os.write(writer, b"still shown")
    copied_output.start()
    copied_output.finish()
    out, err = capfd.readouterr()
    assert out == "still shown"
    assert err.startswith(f"ctl launch: {tmp_path}/job_0.log cannot be written (No space left on device); ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "error_message"),
    [
        ("--workers=2", "no command was given after `--`"),
        ("--workers=2 --", "no command was given after `--`"),
        ("--workers=2 python -m models.mnist", "write the command after `--`"),
        ("--workers=0 -- true", "received '0'; expected a whole number from 1"),
        ("--ps=0 -- true", "received '0'; expected a whole number from 1"),
        ("--workers=two -- true", "received 'two'; expected a whole number from 1"),
        ("--grace_secs=-1 -- true", "received '-1'; expected seconds from 0"),
        ("--grace_secs=nan -- true", "received 'nan'; expected seconds from 0"),
        ("--wrokers=2 -- true", "'--wrokers=2' is not an option"),
        ("--work=2 -- true", "'--work=2' is not an option"),
        ("-- no-such-program --x", "'no-such-program' was not found"),
        ("--host=192.0.2.1 -- true", "--host=127.0.0.1"),
        (f"'--log_dir={__file__}/logs' -- true", "(Not a directory); specify a writable directory"),
        (f"-- '{__file__}'", "cannot be run"),
    ],
)
def test_an_unusable_command_line_is_one_message_and_exit_code_2(line, error_message, capsys, monkeypatch):
    monkeypatch.setattr("ctl.launch.cli.tempfile.mkdtemp", lambda prefix: "unused")
    assert cli.main(["launch", *shlex.split(line)]) == 2
    out, err = capsys.readouterr()
    messages = [text for text in err.splitlines() if "starting" not in text]
    assert out == "" and len(messages) == 1 and error_message in messages[0]


def test_a_program_that_cannot_start_is_exit_code_2(tmp_path, capfd):
    program = tmp_path / "not_a_program"
    program.write_text("neither a script nor a binary")
    program.chmod(0o755)
    assert cli.main(["launch", "--workers=2", f"--log_dir={tmp_path}", "--", str(program)]) == 2
    assert "Exec format error" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "log_dir"),
    [
        (["train", "--model_dir={}/run"], "run/workers"),
        (["train", "--model_dir", "{}/run"], "run/workers"),
        (["train", "-model_dir={}/run", "--steps=3"], "run/workers"),
        (["train", "--model_dir={}/old", "--model_dir={}/new"], "new/workers"),
    ],
)
def test_logs_go_into_the_model_dir_of_the_command(command, log_dir, tmp_path):
    command_line = [argument.format(tmp_path) for argument in command]
    assert launch_cli.choose_log_dir(None, command_line) == tmp_path / log_dir
    assert (tmp_path / log_dir).is_dir()


@pytest.mark.parametrize("command", [["train"], ["train", "--model_dir=gs://bucket/run"]])
def test_without_a_local_model_dir_logs_go_into_a_new_directory(command, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log_dir = launch_cli.choose_log_dir(None, command)
    assert log_dir.parent == tmp_path and log_dir.name.startswith("ctl-launch-")


def test_the_help_names_every_option_with_its_default_and_an_example(capsys):
    assert cli.main(["launch", "--help"]) == 0
    out = capsys.readouterr().out
    names = [name for name in vars(launch_cli.parse_launch(["--", "true"])[0]) if name != "help"]
    for text in (*(f"--{name}" for name in names), "example:"):
        assert text in out
    assert out.count("default:") == len(names) == 20 and "seconds" in out


def test_the_documentation_lists_every_option_and_its_default():
    page = (ROOT / "docs/launch.md").read_text(encoding="utf-8").split("\n## ")[0]
    items = re.findall(r"^- (`-[^:]*): .* \((.*)\)$", re.sub(r"=[^`]*`", "`", page), re.MULTILINE)
    named = [name for options, _ in items for name in re.findall(r"--(\w+)", options)]
    defaults = vars(launch_cli.parse_launch(["--", "true"])[0])
    assert sorted(named) == sorted(name for name in defaults if name != "help")
    for options, default in items:
        value = defaults[re.findall(r"--(\w+)", options)[0]]
        assert not value or f"{value:g}" == default.split(",")[0]


def test_help_after_the_two_dashes_belongs_to_the_command(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(launch_cli, "run_job", lambda command, **_: commands.append(command) or 0)
    line = ["launch", f"--log_dir={tmp_path}", "--", "true", "--help", "--", "-x"]
    assert cli.main(line) == 0
    assert commands == [["true", "--help", "--", "-x"]]


def test_the_ctl_command_lists_its_subcommands_and_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ctl {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert "launch   start, supervise and restart the workers" in capsys.readouterr().out


@pytest.mark.parametrize("line", [[], ["lanch"], ["--lunch"]])
def test_an_unknown_subcommand_is_exit_code_2_and_a_list(line, capsys):
    assert cli.main(line) == 2
    assert "expected one of: deploy, doctor, inspect, launch" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["ctl", "--help"], ["ctl", "launch", "--help"], ["ctl.launch", "--help"]])
def test_the_launcher_never_imports_tensorflow(line, tmp_path):
    for module in ("tensorflow", "numpy", "absl", "keras"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')")
    result = subprocess.run(
        [sys.executable, "-m", *line],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ctl")


def test_signals_are_only_recorded_inside_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with ForwardedSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGTERM] and not signals.is_repeated()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.is_repeated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_system_without_prctl_starts_workers_without_it(monkeypatch):
    ctypes = types.SimpleNamespace(CDLL=lambda _: types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ctypes", ctypes)
    assert process_tree.die_with_parent() is None


def test_a_lock_file_deleted_by_its_last_owner_does_not_allow_two_owners(tmp_path, monkeypatch):
    lock, path, deleted = fcntl.flock, tmp_path / ".launcher", []

    def after_the_deletion(file, operation):
        if not deleted:  # the last owner deletes the file and then unlocks it
            deleted.append(path.unlink())
        return lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_deletion)
    with log_files.log_dir_lock(tmp_path):
        assert deleted and path.exists()
        second = log_files.log_dir_lock(tmp_path)
        with pytest.raises(UsageError, match="is in use: ctl launch, process"), second:
            pass
    assert not path.exists()
