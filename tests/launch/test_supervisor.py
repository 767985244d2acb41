"""Parts of the supervisor without processes: restart policy, progress, log files."""

import inspect
import json
import os
import signal
from pathlib import Path

import pytest
from ctl.errors import EXIT_RETRY
from ctl.launch.attempt_log import AttemptRecord
from ctl.launch.host_allocation import RoleCounts, build_tasks
from ctl.launch.log_files import LogSizeLimit, archive_logs
from ctl.launch.process import ProcessExit
from ctl.launch.process_tree import process_state
from ctl.launch.progress import local_model_dir, newest_step
from ctl.launch.restart_policy import KILLED, OUT_OF_MEMORY, OUTSIDE, REFUSED, RestartPolicy
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = settings(deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["step", "phase", "progressed", "x"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("code", "is_retried", "is_retried_on_error"),
    [
        (1, False, True), (2, False, False), (3, False, True), (127, False, True),
        (128, True, True), (130, False, False), (134, True, True), (137, True, True),
        (139, True, True), (143, False, False), (255, True, True),
    ],
)  # fmt: skip
def test_exit_codes_decide_about_another_attempt(code, is_retried, is_retried_on_error):
    assert (RestartPolicy().decide(code, None).delay_secs is not None) == is_retried
    decision = RestartPolicy(restart_on_error=True).decide(code, None)
    assert (decision.delay_secs is not None) == is_retried_on_error


def test_the_delay_doubles_up_to_a_minute():
    policy = RestartPolicy(max_restarts=9)
    delays_secs = [policy.decide(134 + i, 5).delay_secs for i in range(10)]
    assert delays_secs == [1, 2, 4, 8, 16, 32, 60, 60, 60, None]
    assert RestartPolicy(max_restarts=2000).decide(134, 1).delay_secs == 1


@pytest.mark.parametrize(
    ("steps", "stops_after"),
    [
        ([5, 5, 5], 3),
        ([0, 0, 0], 3),
        ([5, 5, 6, 6, 6], 5),
        ([None] * 3, 3),  # before the first heartbeat
        ([5, None, 5, 5, None], None),
        ([1, 2, 3, 4], None),
        ([9, 5, 5, 5], 4),  # a damaged checkpoint was moved aside in between
    ],
)
def test_three_attempts_that_end_at_one_step_are_a_crash_loop(steps, stops_after):
    policy = RestartPolicy(max_restarts=99)
    decisions = [policy.decide(134, step) for step in steps]
    stopped = [i + 1 for i, v in enumerate(decisions) if v.delay_secs is None]
    assert stopped == ([stops_after] if stops_after else [])
    if stopped:
        last = decisions[stopped[0] - 1]
        assert last.should_report and "3 attempts in a row" in last.refusal


def test_progress_resets_the_number_of_restarts():
    policy = RestartPolicy(max_restarts=2)
    delays = [policy.decide(134, step).delay_secs for step in (0, 0, 5, 5, 7, 7)]
    assert delays == [1, 2, 1, 2, 1, 2]
    assert policy.decide(134, 7).refusal.startswith("2 restarts are used up")


def test_losses_from_outside_use_no_restarts_and_are_no_crash_loop():
    policy = RestartPolicy(max_restarts=2)
    outside_loss = {"loss": OUTSIDE, "has_trained": True}
    assert [policy.decide(255, 5, **outside_loss).delay_secs for _ in range(9)][-1] == 60
    assert policy.restarts == 0
    never = [policy.decide(255, 5, loss=OUTSIDE).delay_secs for _ in range(3)]
    assert never == [60, 60, None]  # an unreachable machine
    assert RestartPolicy(has_dynamic_hosts=True).decide(143, 5).delay_secs == 1
    assert RestartPolicy(max_restarts=0).decide(255, 5, loss=OUTSIDE).delay_secs is None


def test_a_host_that_refuses_the_login_is_permanent_unless_hosts_change():
    decision = RestartPolicy().decide(2, None, loss=REFUSED)
    assert (decision.delay_secs, decision.refusal) == (None, "exit code 2 is a usage error")
    assert RestartPolicy(has_dynamic_hosts=True).decide(2, None, loss=REFUSED).delay_secs == 1
    decision = RestartPolicy().decide(255, 5, loss=OUTSIDE, has_trained=True)
    assert not decision.is_counted and RestartPolicy().decide(255, 5, loss=OUTSIDE).is_counted


def test_kills_before_the_first_step_are_no_crash_loop_and_kills_of_a_step_are():
    start, step = RestartPolicy(max_restarts=1000), RestartPolicy(max_restarts=1000)
    assert all(start.decide(137, 5, loss=KILLED).delay_secs for _ in range(20))
    decisions = [step.decide(137, 5, loss=KILLED, has_trained=True) for _ in range(3)]
    assert "no progress" in decisions[2].refusal and not decisions[1].refusal


def test_two_out_of_memory_kills_end_the_job_with_a_hint():
    policy = RestartPolicy(max_restarts=9)
    first, second = (policy.decide(137, None, loss=OUT_OF_MEMORY) for _ in range(2))
    assert first.delay_secs == 1
    assert "out of memory 2 times in a row: use a smaller --global_batch_size" in second.refusal


def test_the_decision_does_not_depend_on_the_failed_process():
    policy = RestartPolicy(max_restarts=9)
    ends = [policy.decide(137, step, loss=OUT_OF_MEMORY) for step in (None, 0)]
    assert "out of memory 2 times in a row" in ends[1].refusal
    names = list(inspect.signature(policy.decide).parameters)
    assert names == ["exit_code", "step", "loss", "has_trained"], "the process must not matter"


def test_the_refusal_describes_the_missing_progress():
    for saves, step, ending in [(True, 5, "with the newest checkpoint at step 5"),
                                (True, 0, "without a checkpoint"), (False, 5, "at step 5")]:  # fmt: skip
        policy = RestartPolicy(has_checkpoints=saves)
        refusal = [policy.decide(134, step).refusal for _ in range(3)][-1]
        assert refusal == f"no progress: 3 attempts in a row ended {ending}"


def save(directory, name, text):
    (directory / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
    (directory / "checkpoints" / name / "manifest.json").write_text(text)


def test_progress_is_the_newest_step_with_a_manifest_of_its_number(tmp_path):
    assert newest_step(None) is newest_step(tmp_path) is None
    for name, text in [
        ("ckpt-5", '{"step": 5}'), ("ckpt-7", '{"step": 6}'), ("ckpt-8", "{"), ("ckpt-9", "[9]"),
        ("ckpt-11.damaged", '{"step": 11}'), (".tmp-ckpt-12", '{"step": 12}'), ("ckpt-²", "{}"),
    ]:  # fmt: skip
        save(tmp_path, name, text)
    (tmp_path / "checkpoints/ckpt-10").mkdir()
    (tmp_path / "checkpoints/ckpt-13").write_text("a file")
    assert newest_step(tmp_path) == 5
    save(tmp_path, "ckpt-40", '{"step": 40}')
    assert newest_step(str(tmp_path)) == 40


@FUZZ
@given(st.one_of(JSON.map(json.dumps), st.text(min_size=1, max_size=40)))
def test_any_content_of_a_manifest_is_read_without_an_error(tmp_path_factory, text):
    directory = tmp_path_factory.mktemp("manifest")
    save(directory, "ckpt-3", "")
    path = directory / "checkpoints/ckpt-3/manifest.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert newest_step(directory) in (None, 3)


def test_a_manifest_that_ctl_writes_is_read(tmp_path):
    from ctl.checkpoints.protocol import Manifest

    save(tmp_path, "ckpt-3", Manifest(step=3, created=1.0).to_json())
    assert newest_step(tmp_path) == 3


def test_a_model_dir_is_local_or_none():
    assert local_model_dir(["x", "--model_dir", "a", "--model_dir=b"]) == Path("b")
    assert local_model_dir(["x", "--model_dir=gs://b/c"]) is local_model_dir(["x"]) is None


def test_logs_of_a_removed_worker_are_archived_too(tmp_path):
    tasks = build_tasks(RoleCounts(workers=3), "127.0.0.1")
    for i in range(2):
        (tmp_path / f"job_{i}.log").write_text(str(i))
    archive_logs(tmp_path, tasks, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job_0.attempt1.log", "job_1.attempt1.log"]


@pytest.mark.parametrize("lines", [1, 2000])
def test_a_cut_log_stays_below_its_bound_however_often_it_is_cut(tmp_path, lines):
    log, size_limit = tmp_path / "job_1.log", LogSizeLimit(10_000)
    log.write_bytes(b"first\n")
    with open(log, "ab", buffering=0) as worker:  # open all the time, as in a worker
        for round in range(5):
            worker.write(b"".join(b"line %d\n" % i for i in range(lines)) + b"x" * 9_990 + b"\n")
            worker.write(b"last of %d\n" % round)
            size_limit.cut(log)
            text = log.read_bytes()
            assert len(text) <= 5_200 and text.endswith(b"last of %d\n" % round)
            assert text.startswith(b"first\n") and b" bytes were cut here" in text
    LogSizeLimit(0).cut(log)
    LogSizeLimit(10_000).cut(tmp_path / "none.log")


def test_an_exit_has_a_described_reason():
    task = build_tasks(RoleCounts(workers=2), "127.0.0.1")[1]
    assert ProcessExit(task, -signal.SIGKILL, 1.0).reason == "worker 1 (job 1) failed: SIGKILL"
    hung = ProcessExit(task, EXIT_RETRY, 1.0, "sent no heartbeat for 60 s", 60.0)
    assert hung.reason == "worker 1 (job 1) sent no heartbeat for 60 s"
    assert str(hung) == "it sent no heartbeat for 60 s"


def test_an_attempt_is_one_line_of_json(tmp_path):
    for number in (1, 2):
        AttemptRecord(attempt=number, started=1.0, workers=2).append_to(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [1, 2]
    assert set(lines[0]) == {
        "attempt", "started", "ended", "workers", "hosts", "step_before", "step_after", "failed",
        "reason", "detected_secs", "next",
    }  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_the_state_of_a_process_is_a_letter():
    assert process_state(os.getpid()) in "RSD" and process_state(2**30) == ""
