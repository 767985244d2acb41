"""`hvd.run`: execution of a function on several processes, and its results."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import named_functions
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.launch.output import RankOutput
from ctl.launch.rank_job import reports_lost_peer
from ctl.launch.run_function import RankError, run

pytestmark = pytest.mark.workers


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path, monkeypatch):
    """Sets an empty temporary directory and checks that no files remain in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("ctl-run-*"))


def test_results_are_returned_by_rank():
    assert run(named_functions.rank_and_arguments, (1, "a"), {"b": None}, np=3) == [
        (rank, 3, (1, "a"), {"b": None}) for rank in range(3)
    ]
    assert run(named_functions.rank_and_arguments) == [(0, 1, (), {})]
    assert (
        run(named_functions.rank_and_arguments, num_proc=2, hosts="localhost:2", verbose=False)[1][0] == 1
    )


def test_the_function_can_use_collectives():
    assert run(named_functions.average, args=(1.0,), np=2) == [1.5, 1.5]


def test_an_exception_names_its_rank_and_has_its_traceback():
    with pytest.raises(RankError) as raised:
        run(named_functions.fails_on_rank_1, np=2)
    message = str(raised.value)
    assert "failed on rank 1" in message and message.rstrip().endswith("ValueError: no data here")
    assert "named_functions.py" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_the_failed_rank_is_named_and_not_the_rank_that_lost_it(tmp_path, rank):
    with pytest.raises(RankError, match=f"(?s)failed on rank {rank}:.*OSError: disk full"):
        args = (str(tmp_path / "lost"), rank)
        run(named_functions.fails_after_its_peer, args=args, np=2)


def test_last_error_waits_for_the_last_line_of_a_rank():
    output = RankOutput()
    task = Topology()
    _, stderr = output.open_writers(task)
    os.write(stderr, b"HorovodInternalError: rank 1 is gone\n")
    output.close_writers(task)
    threading.Timer(0.2, output.start).start()
    assert reports_lost_peer(output.last_error(task))


def test_a_rank_that_dies_is_an_error():
    with pytest.raises(RankError, match="rank 0 ended without a result; the job's exit code is 3"):
        run(named_functions.dies, np=1)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankError, match="the return value, of type function, cannot be pickled"):
        run(named_functions.returns_an_unpicklable_value, np=1)


def test_the_output_of_the_ranks_is_printed(capfd):
    run(print, args=("hello",), np=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_the_directory_is_readable_by_the_owner_only(tmp_path):
    assert run(named_functions.modes, args=(str(tmp_path),), np=1) == [[0o700]]


@pytest.mark.slow  # elastic jobs: tests/hvd/test_elastic.py
def test_an_elastic_function_continues_without_a_process_that_dies(tmp_path):
    died = str(tmp_path / "died")
    results = run(named_functions.sum_of_steps, args=(died,), np=2, min_np=1, reset_limit=1)
    assert results == [10.0] and Path(died).exists()


def test_a_lambda_is_sent_with_cloudpickle():
    pytest.importorskip("cloudpickle")
    offset = 5
    assert run(lambda x: int(os.environ["HOROVOD_RANK"]) + x + offset, (1,), np=2) == [6, 7]


def test_a_function_of_main_is_sent_with_cloudpickle_or_refused_with_a_hint(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from ctl.launch.run_function import run\n"
        "if 'without' in sys.argv: sys.modules['cloudpickle'] = None\n"
        "def rank(): return int(os.environ['HOROVOD_RANK'])\n"
        "if __name__ == '__main__': print(run(rank, np=2))\n"
    )

    def output_of(*arguments):
        result = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=ROOT, timeout=TIMEOUT_SECS,
                env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path])),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return result.stdout + result.stderr

    assert "`pip install cloudpickle`" in output_of("without")
    pytest.importorskip("cloudpickle")
    assert "[0, 1]" in output_of()


@pytest.mark.parametrize(("options", "error_message"), [
    ({"min_np": 2, "np": 1}, "--min-np 2 is greater than -np 1"),
    ({"max_np": 2}, "--max-np requires an elastic job"),
    ({"min_np": 1, "hosts": "far1:1"}, "far1 is another machine"),
    ({"use_mpi": True}, "start a script with `ctlrun --mpi`"),
    ({"hosts": "far1:1"}, "far1 is another machine, but a function runs on this machine only"),
    ({"hosts": "localhost:1", "np": 2}, "-np 2 is greater than the 1 slot of localhost:1"),
], ids=str)  # fmt: skip
def test_unusable_options_are_refused(options, error_message):
    with pytest.raises(UsageError) as raised:
        run(named_functions.rank_and_arguments, **options)
    assert error_message in str(raised.value)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected argument 'nump'"):
        run(named_functions.rank_and_arguments, nump=2)


def test_other_arguments_of_horovod_are_accepted():
    horovod_options = {"use_gloo": True, "disable_cache": True, "start_timeout": 60, "mpi_args": None,
                       "network_interfaces": ["eth0"], "ssh_port": None}  # fmt: skip
    assert run(named_functions.rank_and_arguments, np=1, executable=sys.executable, **horovod_options) == [
        (0, 1, (), {})
    ]


def test_a_call_in_a_thread_is_refused_with_a_hint():
    errors = []

    def call():
        try:
            run(named_functions.rank_and_arguments)
        except UsageError as e:
            errors.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(600)
    assert errors == ["run() was called in another thread; call it in the main thread."]
