"""Promise 27: a bucket that is mounted as files, without renames and with late listings.

The bucket is tests/programs/object_store.py, a FUSE file system; where this user may not mount one, the
tests are skipped. It is detected by its type, as gcsfuse is. No test declares it as a bucket.
"""

import json
import subprocess
import sys
import threading

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment, some_of
from ctl.distribute.topology import Topology
from ctl.io import paths
from ctl.launch.heartbeat_monitor import HeartbeatMonitor, Timeouts, heartbeat_dir
from ctl.supervision.lease import Lease
from object_store import unmount
from polling import wait_until
from saving_jobs import checkpoints, jobs  # noqa: F401
from saving_jobs import unbroken as final  # noqa: F401
from tensorboard_runs import scalar_steps
from training import STEPS, assert_bit_identical, run

pytestmark = pytest.mark.workers
BACKOFF = ("--backoff_secs=0.2",)


@pytest.fixture
def bucket(tmp_path):
    """Returns bucket(*options) -> a directory in a mounted bucket; .refused() lists refused operations."""
    process, mount_point = [], tmp_path / "bucket"

    class Bucket:
        path = mount_point / "b"

        def __call__(self, *options):
            mount_point.mkdir()
            log = f"--refused={tmp_path / 'refused'}"
            process.append(subprocess.Popen(
                [sys.executable, str(PROGRAMS / "object_store.py"), str(mount_point), log, *options],
                stdout=subprocess.PIPE, text=True,
            ))  # fmt: skip
            first_line = process[0].stdout.readline()
            if "mounted" not in first_line:
                pytest.skip(first_line.strip() or "no FUSE here")
            self.path.mkdir()
            return self.path

        def refused(self):
            log = tmp_path / "refused"
            return log.read_text().splitlines() if log.exists() else []

    yield Bucket()
    if process:
        process[0].terminate()
        try:
            process[0].wait(10)
        except subprocess.TimeoutExpired:
            process[0].kill()
            process[0].wait()
        unmount(mount_point)


def events(model_dir, steps, run_name="train", missing=0):
    """Steps of the losses that TensorBoard shows, when the listing shows all `steps` but `missing`."""

    def listed():
        shown = scalar_steps(model_dir / "logs" / run_name)
        return shown if len(set(steps) - set(shown)) <= missing else None

    return wait_until(listed)


def test_a_mounted_bucket_is_found_by_its_type(bucket, tmp_path):
    mount_point = bucket()
    (tmp_path / "link").symlink_to(mount_point)
    assert paths.has_rename(tmp_path) and not paths.has_rename(mount_point / "run" / "checkpoints")
    assert not paths.has_rename(tmp_path / "link" / "run")


def assert_complete(model_dir, bucket, output):
    """Checks that a run of faulty.py wrote every file, and that the bucket refused no operation."""
    assert bucket.refused() == []
    assert json.loads((model_dir / "LOCK").read_text())["state"] == "ended"
    assert json.loads((model_dir / "config.json").read_text())["model"] == "Faulty"
    assert (model_dir / "export" / "saved_model" / "saved_model.pb").stat().st_size > 0
    assert (model_dir / "export" / "model.keras").stat().st_size > 0
    assert not [w for w in ("cannot be written", "Cannot", "damaged") if w in output], output
    # values that a killed process has not flushed are lost
    steps = events(model_dir, range(1, STEPS + 1), missing=9)
    assert steps == sorted(set(steps)), "taken back where the run went back"


def test_a_killed_run_in_a_bucket_resumes_as_on_a_disk(bucket, unbroken):
    model_dir = bucket("--delay_secs=3") / "run"
    options = ["--export=keras,saved_model"]
    assert run(model_dir, *options, faults="kill@27").code == -9
    result = run(model_dir, *options)
    assert result.code == 0 and "resuming at step 25" in result.output, result.output[-3000:]
    assert_bit_identical(model_dir, unbroken(0))
    assert_complete(model_dir, bucket, result.output)


@pytest.mark.slow
def test_killed_workers_cost_nothing_in_a_bucket(bucket, unbroken):
    model_dir = bucket("--delay_secs=1") / "run"
    result = run(
        model_dir, "--export=keras,saved_model", workers=2, faults="kill@13:1 kill@27:0",
        launcher=(*BACKOFF, "--heartbeat_timeout_secs=6"), PAUSE_SECS="0.25",
    )  # fmt: skip
    assert result.code == 0, result.output[-3000:]
    assert "resuming at step 10" in result.output and "resuming at step 25" in result.output
    assert_bit_identical(model_dir, unbroken(2))
    assert_complete(model_dir, bucket, result.output)


def test_heartbeats_are_kept_out_of_a_bucket(bucket):
    task = Topology({"worker": ("127.0.0.1:1",)}, "worker", 0)
    monitor = HeartbeatMonitor(heartbeat_dir(bucket() / "workers"), Timeouts())
    path = monitor.path(task, is_remote=True)
    assert paths.has_rename(path) and path.name.startswith("job_0.")


KILL_POSITIONS = ("mid_data", "before_index", "before_manifest", "before_deleting")


@pytest.mark.parametrize(
    "save_mode", ["at once", pytest.param("in the background", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kill_position", some_of(KILL_POSITIONS, "before_manifest", "before_deleting"))
def test_a_save_killed_in_a_bucket_costs_at_most_one_interval(
    jobs, final, bucket, kill_position, save_mode  # noqa: F811
):  # fmt: skip
    model_dir = bucket("--delay_secs=30") / "run"  # no new file is listed during the test
    arguments = ["--keep=1", *(["--background"] if save_mode != "at once" else [])]
    assert jobs(model_dir, *arguments, faults=f"kill:{kill_position}@4").code == -9
    before = checkpoints(model_dir)
    assert before and set(before) <= {2, 4}
    result = jobs(model_dir, *arguments)
    assert result.code == 0 and result.json["began"] == before[-1], result.output
    assert result.json["final"] == final
    assert checkpoints(model_dir) == [8]
    assert bucket.refused() == []


def test_a_damaged_checkpoint_in_a_bucket_is_passed_over_and_set_aside(
    jobs, bucket  # noqa: F811
):  # fmt: skip
    model_dir = bucket("--delay_secs=30") / "run"
    assert jobs(model_dir).code == 0
    data = model_dir / "checkpoints" / "ckpt-8" / "state.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-3])
    result = jobs(model_dir, "--steps=10")
    assert result.code == 0 and result.json["began"] == 6, result.output
    assert checkpoints(model_dir) == [2, 4, 6, 8, 10]
    aside = model_dir / "checkpoints" / "damaged" / "ckpt-8"
    assert (aside / "manifest.json").exists() and (aside / "state.index").exists()
    assert bucket.refused() == []


def test_a_bucket_that_renames_nothing_at_all_holds_checkpoints(jobs, final, bucket):  # noqa: F811
    model_dir = bucket("--no_renames") / "run"
    result = jobs(model_dir, "--keep=1")
    assert result.code == 0 and result.json["final"] == final, result.output
    assert checkpoints(model_dir) == [8]


def test_an_evaluator_follows_a_training_in_a_bucket(bucket):
    model_dir = bucket("--delay_secs=2") / "run"
    result = processes.run(
        [sys.executable, "-m", "ctl.launch", "--workers=1", "--evaluator", "--", sys.executable, "-m",
         "models.mnist", f"--model_dir={model_dir}", "--train_steps=30", "--save_every_steps=10",
         "--global_batch_size=32", "--keep=0", "--export=none"],
        env=environment(), cwd=ROOT, timeout=TIMEOUT_SECS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = (model_dir / "evaluations.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if row["run"] == "eval"] == [10, 20, 30]
    assert set(json.loads((model_dir / "evaluated.json").read_text())["evaluated"]) == {
        "10", "20", "30"}  # fmt: skip
    assert events(model_dir, [10, 20, 30], "eval") == [10, 20, 30]
    assert bucket.refused() == []


def test_the_lock_in_a_bucket_is_whole_at_every_moment(bucket):
    path = bucket("--delay_secs=30") / "LOCK"
    lease, reader, ended = Lease(path, beat_secs=0.001), Lease(path), threading.Event()
    steps = iter(range(10**9))

    def hold():
        with lease.held(step=lambda: next(steps)):
            ended.wait(TIMEOUT_SECS)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        wait_until(lambda: reader.read() is not None)
        owners = [reader.read() for _ in range(300)]
        wait_until(lambda: owners.append(reader.read()) or len({h.step for h in owners if h}) > 5)
    finally:
        ended.set()
        holding.join()
    assert None not in owners
    assert reader.read().state == "ended"
