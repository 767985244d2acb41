"""Detection of stopped ranks by the launcher. The job ends or continues without them."""

import os
import re
import signal

import pytest
from ctlrun_jobs import Ctlrun
from hvd.elastic_jobs import ElasticJob

pytestmark = pytest.mark.workers


@pytest.fixture
def ctlrun(tmp_path):
    ctlrun = Ctlrun(tmp_path, warm=True)
    yield ctlrun
    ctlrun.close()


def test_a_rank_that_is_stopped_ends_a_job_that_would_wait_for_ever(ctlrun):
    program = """
    import ctl.hvd as hvd
    hvd.init()
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.barrier()
    """
    code, _, err = ctlrun.run(program, "-np", "2", "--heartbeat-timeout", "6")
    assert code == 134, err
    assert re.search(r"rank 1 sent no heartbeat for \d+ s; terminating the remaining ranks: 0", err)


def test_a_rank_that_is_stopped_before_its_first_sign_of_life_is_found_too(ctlrun):
    program = """
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(lambda: False)
    """
    code, _, err = ctlrun.run(program, "-np", "2", "--heartbeat-timeout", "1")
    assert code == 134 and re.search(r"rank 1 was stopped for \d+ s before", err), err


def test_a_rank_that_runs_for_longer_than_the_limit_is_left_alone(ctlrun):
    program = """
    from ctl.supervision import heartbeat
    heartbeat.current.start()
    time.sleep(9)
    """
    code, _, err = ctlrun.run(program, "-np", "2", "--heartbeat-timeout", "6")
    assert code == 0, err


@pytest.mark.slow
def test_a_rank_of_an_elastic_job_that_is_stopped_is_replaced(tmp_path):
    job = ElasticJob(tmp_path, "localhost:2", "-np", "2", "--min-np", "1", "--heartbeat-timeout", "5")
    victim = job.wait_for_step(3, 2)[1]
    os.kill(victim["pid"], signal.SIGSTOP)
    job.go(6)
    job.wait(lambda: f"process {victim['number']} sent no heartbeat" in job.output)
    job.go(1000)
    code, output = job.end()
    assert code == 0, output[-3000:]
