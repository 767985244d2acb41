"""Detection of hung processes, with manually written heartbeats and a manual clock."""

import json
import os

import pytest
from ctl.launch.heartbeat_monitor import HeartbeatMonitor, Timeouts
from ctl.launch.host_allocation import RoleCounts, build_tasks
from ctl.launch.roles import log_name
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


class ManualHeartbeats:
    """Manually written heartbeats of two workers, and a manual clock."""

    def __init__(self, directory, **timeouts):
        self.now_secs = 100.0
        self.directory = directory
        self.tasks = build_tasks(RoleCounts(workers=2, evaluator=True), "127.0.0.1")
        self.monitor = HeartbeatMonitor(directory, Timeouts(**timeouts), clock=lambda: self.now_secs)
        self.monitor.reset(self.tasks)

    def beat(self, index, text=None, **fields):
        text = json.dumps({"step": 7, "phase": "training", **fields}) if text is None else text
        self.monitor.path(self.tasks[index]).write_text(text, encoding="utf-8", errors="replace")

    def check_after(self, after_secs, **options):
        self.now_secs += after_secs
        return self.monitor.check(self.tasks, **options)


def test_silence_is_counted_from_the_last_change(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    for beat in range(3):
        heartbeats.beat(0, beat=beat)
        heartbeats.beat(1, beat=0)
        assert heartbeats.check_after(29.0) is None
    hang = heartbeats.check_after(3.0)
    assert hang.task == heartbeats.tasks[1] and hang.silent_secs == 61.0
    assert hang.description == "sent no heartbeat for 61 s (last at step 7)"


@pytest.mark.parametrize(("share", "is_hung"), [(0.0, True), (0.01, True), (0.1, False), (1.0, False)])
def test_a_silent_process_that_uses_a_processor_is_not_hung(tmp_path, share, is_hung):
    """A long call of native code may hold the interpreter lock."""
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    heartbeats.beat(0)
    name, start, hertz = log_name(heartbeats.tasks[0]), heartbeats.now_secs, os.sysconf("SC_CLK_TCK")

    def ticks():
        return {name: int((heartbeats.now_secs - start) * hertz * share)}

    hangs = [heartbeats.check_after(0.5, cpu_ticks=ticks) for _ in range(120)]
    assert hangs == [None] * 120
    hangs = [heartbeats.check_after(0.5, cpu_ticks=ticks) for _ in range(6)]
    assert any(hangs) == is_hung


def test_a_process_that_becomes_idle_is_hung_one_timeout_later(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    heartbeats.beat(0)
    name, start, hertz = log_name(heartbeats.tasks[0]), heartbeats.now_secs, os.sysconf("SC_CLK_TCK")

    def ticks():
        return {name: int(min(heartbeats.now_secs - start, 100.0) * hertz)}

    num_checks = next(i for i in range(1000) if heartbeats.check_after(0.5, cpu_ticks=ticks))
    assert 155 <= num_checks / 2 <= 165


def test_a_heartbeat_that_cannot_be_read_is_no_silence(tmp_path):
    """The directory with heartbeats of other machines may be deleted or unavailable."""
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    path = heartbeats.monitor.path(heartbeats.tasks[0], is_remote=True)
    assert path.parent == tmp_path
    path.write_text('{"step": 7}')
    assert heartbeats.check_after(1.0) is None
    path.unlink()
    assert [heartbeats.check_after(59.0) for _ in range(5)] == [None] * 5
    path.write_text('{"step": 7}')
    assert heartbeats.check_after(1.0) is None
    assert heartbeats.check_after(61.0).task == heartbeats.tasks[0]


def test_a_process_of_an_earlier_attempt_does_not_beat_for_its_successor(tmp_path):
    """A process on a disconnected host still writes and creates a deleted file again."""
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    task = heartbeats.tasks[0]
    earlier = heartbeats.monitor.path(task, is_remote=True)
    heartbeats.monitor.reset(heartbeats.tasks)
    path = heartbeats.monitor.path(task, is_remote=True)
    earlier.write_text('{"step": 7, "phase": "training"}')
    assert path != earlier and heartbeats.check_after(1.0) is None
    assert not heartbeats.monitor.has_trained(task)
    path.write_text('{"step": 7, "phase": "training"}')
    assert heartbeats.check_after(1.0) is None and heartbeats.monitor.has_trained(task)
    monitor = ManualHeartbeats(tmp_path, heartbeat=60.0).monitor
    assert monitor.path(task, is_remote=True) != path and not path.exists(), "same path as before"


def test_clocks_of_other_machines_do_not_matter(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0)
    for beat in (0.0, 1e12, -5.0):
        heartbeats.beat(0, beat=beat)
        assert heartbeats.check_after(59.0) is None


def test_a_process_that_never_sends_heartbeats_is_not_hung(tmp_path):
    assert ManualHeartbeats(tmp_path, heartbeat=1.0, startup=1.0, hang=1.0).check_after(1e6) is None


def test_a_timeout_of_zero_is_disabled(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=0.0, startup=0.0, hang=0.0)
    heartbeats.beat(0)
    assert heartbeats.check_after(1.0) is None and heartbeats.check_after(1e6) is None


@pytest.mark.parametrize(
    ("phase", "secs", "is_hung"),
    [
        ("connecting", 590.0, False),  # TensorFlow may block all threads while it waits for peers
        ("connecting", 610.0, True),
        ("starting", 61.0, True),
        ("saving", 61.0, True),
        ("ended", 61.0, False),
        ("ended", 301.0, True),
        (None, 61.0, True),
    ],
)
def test_the_timeout_depends_on_the_phase(tmp_path, phase, secs, is_hung):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0, startup=600.0)
    heartbeats.beat(0, phase=phase)
    heartbeats.beat(1, beat=0)
    heartbeats.check_after(1.0)
    heartbeats.beat(1, beat=1)
    hang = heartbeats.check_after(secs)
    assert (hang is not None and hang.task == heartbeats.tasks[0]) == is_hung


@pytest.mark.parametrize("phase", ["starting", "compiling"])
def test_a_hang_before_the_first_step_has_the_limit_of_a_start(tmp_path, phase):
    heartbeats = ManualHeartbeats(tmp_path, hang=60.0, startup=600.0)
    heartbeats.beat(0, phase=phase, beat=0)
    assert heartbeats.check_after(1.0) is None
    heartbeats.beat(0, phase=phase, beat=1)
    assert heartbeats.check_after(598.0) is None
    heartbeats.beat(0, phase=phase, beat=2)
    hang = heartbeats.check_after(3.0)
    assert hang.task == heartbeats.tasks[0] and f"was {phase} for 601 s" in hang.description
    heartbeats = ManualHeartbeats(tmp_path, startup=600.0, hang=0.0, heartbeat=0.0)  # hang=0: disabled
    heartbeats.beat(0, phase=phase)
    heartbeats.beat(1)
    assert heartbeats.check_after(1.0) is None and heartbeats.check_after(1e5) is None


def test_a_stopped_process_that_waits_for_peers_has_the_usual_timeout(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, heartbeat=60.0, startup=600.0)
    heartbeats.beat(0, phase="connecting")
    assert heartbeats.check_after(1.0) is None
    assert heartbeats.check_after(61.0, stopped=[heartbeats.tasks[0]]).task == heartbeats.tasks[0]


def test_missing_processes_are_named_when_other_processes_have_started(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, startup=600.0)
    heartbeats.beat(0)
    assert heartbeats.check_after(599.0) is None
    heartbeats.beat(0, beat=1)
    hang = heartbeats.check_after(2.0)
    assert hang.task == heartbeats.tasks[1]
    assert hang.description == "sent no heartbeat within 601 s of the start"
    heartbeats.monitor.reset(heartbeats.tasks)
    assert heartbeats.check_after(600.0) is None, "no process sends heartbeats"
    heartbeats.tasks = build_tasks(RoleCounts(workers=3), "127.0.0.1")
    heartbeats.beat(1)
    description = heartbeats.check_after(1.0).description
    assert description == "sent no heartbeat within 601 s of the start, nor did worker 2 (job 2)"
    heartbeats.tasks = heartbeats.tasks[:2]
    heartbeats.beat(0, beat=2)
    heartbeats.beat(1, beat=2)
    heartbeats.monitor.forget(heartbeats.tasks[1])
    assert heartbeats.check_after(1.0, remote=[heartbeats.tasks[1]]) is None, "a remote file may be missing"


def test_a_missing_step_is_a_hang_only_while_training(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path, hang=100.0)
    for beat in range(4):
        heartbeats.beat(0, beat=beat, phase="evaluating", progressed=1.0)
        assert heartbeats.check_after(50.0) is None
    for beat in range(4, 8):
        heartbeats.beat(0, beat=beat, progressed=1.0)
        hang = heartbeats.check_after(40.0)
    assert hang.description == "completed no step for 120 s (last at step 7)"


def test_the_monitor_waits_for_a_save_only_with_recent_heartbeats(tmp_path):
    heartbeats = ManualHeartbeats(tmp_path)
    assert not heartbeats.monitor.is_saving(heartbeats.tasks)
    heartbeats.beat(1, phase="saving")
    assert heartbeats.monitor.is_saving(heartbeats.tasks)
    heartbeats.now_secs += 6.0
    assert not heartbeats.monitor.is_saving(heartbeats.tasks)


@FUZZ
@given(st.one_of(JSON.map(json.dumps), st.text(min_size=1, max_size=40)))
def test_any_content_of_a_heartbeat_counts_as_a_heartbeat(text):
    heartbeats = FUZZ_HEARTBEATS
    heartbeats.now_secs += 1.0
    heartbeats.monitor.reset(heartbeats.tasks)
    heartbeats.beat(0, text)
    assert heartbeats.check_after(1.0) is None
    assert isinstance(heartbeats.monitor.highest_step, (int, type(None)))
    assert heartbeats.monitor.has_heartbeats and heartbeats.check_after(3.0).task == heartbeats.tasks[0]


@pytest.fixture(autouse=True)
def fuzz_heartbeats(tmp_path_factory):
    global FUZZ_HEARTBEATS  # noqa: PLW0603 (a fixture argument would be shared by all examples)
    FUZZ_HEARTBEATS = ManualHeartbeats(tmp_path_factory.mktemp("hearts"), heartbeat=2.0, startup=0.0)
