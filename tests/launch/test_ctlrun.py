"""`ctlrun` with real processes: ranks, output, exits."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT_SECS
from ctlrun_jobs import Ctlrun, by_rank
from launching import is_alive
from polling import wait_until

pytestmark = pytest.mark.workers

FAKE_SSH = Path(ROOT) / "tests" / "programs" / "fake_ssh.py"
PREFIXES = ("HOROVOD", "TF_C")
PRINT_VARIABLES = f"print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith({PREFIXES})}}))"
RANK_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@pytest.fixture
def ctlrun(tmp_path):
    job = Ctlrun(tmp_path)
    yield job
    job.close()


def install_fake_ssh(ctlrun):
    (ctlrun.dir / "ssh").write_bytes(FAKE_SSH.read_bytes())
    (ctlrun.dir / "ssh").chmod(0o755)


def rank_variables(out):
    """Returns the values of the rank variables by rank."""
    variables = {rank: json.loads(lines[-1]) for rank, lines in by_rank(out).items()}
    return [[int(variables[r][f"HOROVOD_{name}"]) for name in RANK_VARIABLES] for r in sorted(variables)]


def test_each_rank_has_its_variables_on_one_machine(ctlrun):
    code, out, err = ctlrun.run(PRINT_VARIABLES, "-np", "2")
    assert (code, rank_variables(out)) == (0, [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]), err


def test_hosts_are_filled_in_their_order(ctlrun):
    code, out, _ = ctlrun.run(PRINT_VARIABLES, "-np", "3", "-H", "localhost:2,127.0.0.2:2")
    assert code == 0
    assert rank_variables(out) == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]
    names = [json.loads(by_rank(out)[rank][0])["HOROVOD_HOSTNAME"] for rank in range(3)]
    assert names == ["localhost", "localhost", "127.0.0.2"]


@pytest.mark.parametrize("option", ["-hostfile", "--hostfile"])
def test_a_hostfile_is_equivalent_to_H(ctlrun, option):
    (ctlrun.dir / "hosts").write_text("# ours\nlocalhost slots=1\n\n127.0.0.2   slots = 2  # more\n")
    code, out, _ = ctlrun.run(PRINT_VARIABLES, "-np", "3", option, str(ctlrun.dir / "hosts"))
    assert code == 0
    assert rank_variables(out) == [[0, 3, 0, 1, 0, 2], [1, 3, 0, 2, 1, 2], [2, 3, 1, 2, 0, 1]]


def test_a_script_of_ctl_finds_its_cluster(ctlrun):
    program = """
        sys.path.insert(0, os.environ["PYTHONPATH"])
        from ctl.distribute import rank_variables
        from ctl.distribute.platforms import detection
        topology, ranks = detection.read_topology(), rank_variables.read_ranks()
        assert topology.num_workers == ranks.size == 2 and topology.worker_index == ranks.rank == rank
        print(len(set(ranks.addresses)), len(os.environ["CTL_HVD_SECRET"]))
    """
    code, out, err = ctlrun.run(program, "-np", "2", CTL_HVD_SECRET="old", HOROVOD_RANK="7")
    assert code == 0, err
    assert by_rank(out) == {0: ["2 64"], 1: ["2 64"]}


def test_the_options_of_the_script_are_not_parsed(ctlrun):
    arguments = ("--np", "3", "--verbose", "-H", "nowhere:1", "--", "-x")
    code, out, _ = ctlrun.run("print(sys.argv[1:])", "-np", "1", arguments=arguments)
    assert (code, by_rank(out)[0]) == (0, [str(list(arguments))])
    code, out, _ = ctlrun.run("print(sys.argv[1:])", "-np", "1", "--", arguments=arguments)
    assert (code, by_rank(out)[0]) == (0, [str(list(arguments))])


def test_every_line_begins_with_its_rank_and_stream(ctlrun):
    program = """
        print("one"); print("two", file=sys.stderr); sys.stdout.write("half \\rfull\\nlast")
        sys.stdout.flush()
    """
    code, out, err = ctlrun.run(program, "-np", "2")
    assert code == 0
    for rank in range(2):
        prefix = f"[{rank}]<stdout>:"
        lines = [line for line in re.findall(r"[^\r\n]*[\r\n]", out) if line.startswith(prefix)]
        assert lines == [f"{prefix}one\n", f"{prefix}half \r", f"{prefix}full\n", f"{prefix}last\n"]
        assert f"[{rank}]<stderr>:two\n" in err
    assert len(re.findall(r"[^\r\n]*[\r\n]", out)) == 8


@pytest.mark.parametrize("option", ["-prefix-timestamp", "--prefix-output-with-timestamp"])
def test_lines_can_begin_with_the_time(ctlrun, option):
    _, out, _ = ctlrun.run("print('one')", "-np", "1", option)
    assert re.fullmatch(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:one\n", out)


def test_output_is_also_written_to_files_with_sorted_names(ctlrun):
    logs = ctlrun.dir / "a" / "logs"
    program = "print(rank); print(-rank, file=sys.stderr)"
    code, out, _ = ctlrun.run(program, "-np", "11", "--output-filename", str(logs))
    assert code == 0 and by_rank(out)[10] == ["10"]
    assert sorted(p.name for p in logs.iterdir()) == [f"rank.{rank:02d}" for rank in range(11)]
    assert (logs / "rank.10" / "stdout").read_text() == "10\n"
    assert (logs / "rank.03" / "stderr").read_text() == "-3\n"


def test_the_first_to_fail_ends_all_and_is_named(ctlrun):
    program = """
        leave(f"pid{rank}", str(os.getpid()))
        wait_for(lambda: all((here / f"pid{r}").exists() for r in range(3)))
        if rank == 1:
            sys.exit(7)
        time.sleep(1000)
    """
    code, _, err = ctlrun.run(program, "-np", "3")
    assert code == 7
    assert "rank 1 failed: exit code 7; terminating the remaining ranks: 0, 2" in err
    assert not any(is_alive(int(ctlrun.read(f"pid{rank}"))) for rank in range(3))


def test_a_rank_that_dies_by_a_signal_is_named_with_it(ctlrun):
    program = "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(1000)"
    code, _, err = ctlrun.run(program, "-np", "2")
    assert code == 137 and "rank 0 was ended by SIGKILL" in err


def test_the_failed_rank_is_named_and_not_the_rank_that_lost_it(ctlrun):
    program = """
        if rank == 0:
            leave("lost", str(os.getpid()))
            sys.exit("ctl.hvd.errors.HorovodInternalError: rank 1 is gone")
        pid = int(wait_for((here / "lost").exists) or (here / "lost").read_text())
        def is_gone():
            try: os.kill(pid, 0)
            except ProcessLookupError: return True
        wait_for(is_gone)
        sys.exit(9)
    """
    code, _, err = ctlrun.run(program, "-np", "2")
    assert code == 9 and "rank 1 failed: exit code 9" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(ctlrun, signum, code):
    program = """
        signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        leave(f"pid{rank}", str(os.getpid()))
        time.sleep(1000)
    """
    ctlrun.start(program, "-np", "2")
    pids = [int(ctlrun.read(f"pid{rank}")) for rank in range(2)]
    ctlrun.process.send_signal(signum)
    assert ctlrun.end()[0] == code
    assert not any(map(is_alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="supported on Linux only")
def test_ranks_and_their_child_processes_end_with_a_killed_launcher(ctlrun):
    program = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        leave(f"pids{rank}", f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    """
    ctlrun.start(program, "-np", "2")
    pids = [int(pid) for rank in range(2) for pid in ctlrun.read(f"pids{rank}").split()]
    ctlrun.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_each_rank_sees_one_gpu_of_those_that_the_launcher_sees(ctlrun):
    program = 'print(os.environ["CUDA_VISIBLE_DEVICES"])'
    _, out, _ = ctlrun.run(program, "-np", "2", "--bind_gpus")
    assert by_rank(out) == {0: ["0"], 1: ["1"]}
    _, out, _ = ctlrun.run(program, "-np", "2", "--bind_gpus", CUDA_VISIBLE_DEVICES="3,GPU-8")
    assert by_rank(out) == {0: ["3"], 1: ["GPU-8"]}
    code, _, err = ctlrun.run(program, "-np", "2", "--bind_gpus", CUDA_VISIBLE_DEVICES="3")
    assert code == 2 and "start at most 1 processes on this machine" in err


def test_a_remote_rank_gets_its_environment_over_the_connection_only(ctlrun):
    install_fake_ssh(ctlrun)
    program = """
        print(os.environ["FAR_HOST"], os.environ["DATA"], len(os.environ["CTL_HVD_SECRET"]))
        print(os.environ["CTL_COLLECTIVES"], os.environ.get("CTL_PROFILE"))
        print(os.environ.get("SSH_AUTH_SOCK"), json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    """
    log = ctlrun.dir / "ssh.log"
    code, out, err = ctlrun.run(
        program, "-np", "3", "-H", "far1:2,me@far2:1", "-p", "2222", "-i", "/key file",
        PATH=f"{ctlrun.dir}:{os.environ['PATH']}", FAKE_SSH_LOG=str(log),
        DATA="a 'b'\n$HOME ü", SSH_AUTH_SOCK="/s", CTL_COLLECTIVES="tcp", CTL_PROFILE="/p",
    )  # fmt: skip
    assert code == 0, err
    assert by_rank(out)[0] == ["far1 a 'b'", "$HOME ü 64", "tcp None", "None 0"]
    assert by_rank(out)[2][0] == "me@far2 a 'b'"
    calls = [json.loads(line)["words"] for line in log.read_text().splitlines()]
    assert all(call[call.index("-p") : call.index("-p") + 4] == ["-p", "2222", "-i", "/key file"]
               for call in calls)  # fmt: skip
    assert "SECRET" not in log.read_text() and "DATA" not in log.read_text()


def test_a_host_that_cannot_be_reached_is_named(ctlrun):
    install_fake_ssh(ctlrun)
    (ctlrun.dir / "dead").write_text("far2")
    code, _, err = ctlrun.run(
        "time.sleep(1000)", "-np", "2", "-H", "far1:1,far2:1",
        PATH=f"{ctlrun.dir}:{os.environ['PATH']}", FAKE_SSH_LOG=str(ctlrun.dir / "ssh.log"),
        FAKE_SSH_DEAD=str(ctlrun.dir / "dead"),
    )  # fmt: skip
    assert code == 255 and "rank 1 cannot be started, because host far2 cannot be reached: ssh: conn" in err


def test_the_command_is_installed_under_its_name():
    printed = subprocess.run(
        [sys.executable, "-c", "import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))"
         "['project']['scripts']['ctlrun'])"],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    if sys.version_info >= (3, 11):
        assert printed.stdout.strip() == "ctl.launch.horovodrun_cli:main"
