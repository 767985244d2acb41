"""Jobs with parameter servers, a real process per task: counts, data, lost tasks, checkpoints."""

import json
import re
import signal
import time

import ctl
import pytest
from conftest import TIMEOUT_SECS
from serving import ServedJob
from small_models import Small

pytestmark = pytest.mark.workers
LEAVE_SECS = 60  # for servers to end after the chief
MNIST = ["-m", "models.mnist", "--global_batch_size=32", "--export=none", "--log_every_steps=5",
         "--save_every_steps=20", "--mode=train", "--steps_per_loop=5"]  # fmt: skip


@pytest.fixture
def serve(tmp_path):
    """Returns a function that starts all tasks of a job; the tasks are ended after the test."""
    jobs = []

    def start(arguments, **shape):
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        jobs.append(ServedJob(directory, arguments, **shape))
        jobs[-1].start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop_all()


def asynchronous_program(**options):
    return ["tests/programs/asynchronous.py", json.dumps(options)]


def wait_for_servers_to_end(job):
    deadline = time.monotonic() + LEAVE_SECS
    names = [n for n in job.tasks if n != "chief0"]
    codes = {n: job.result(n, max(0.1, deadline - time.monotonic())).code for n in names}
    assert set(codes.values()) == {0}, codes


def logged_steps(model_dir):
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_a_thousand_steps_are_a_thousand_updates_and_the_servers_leave(serve, tmp_path):
    model_dir = tmp_path / "run"
    every = {"log": 100, "evaluate": 500, "save": 400}
    job = serve(asynchronous_program(optimizer="adam", steps=1000, model_dir=str(model_dir), every=every))
    chief = job.result("chief0")
    assert chief.code == 0, chief.output[-3000:]
    wait_for_servers_to_end(job)
    assert (chief.json["step"], chief.json["iterations"]) == (1000, 1000)
    assert chief.json["logged"] == list(range(100, 1001, 100))
    assert chief.json["evaluated"] == [500, 1000]
    assert chief.json["losses"][-1] < chief.json["losses"][0]
    assert chief.json["examples"] == 24000
    saved = {p.name for p in (model_dir / "checkpoints").iterdir()}
    assert saved == {f"ckpt-{step}" for step in (400, 500, 800, 1000)}  # 500: before its evaluation
    single_device = Small(optimizer="adam", strategy="default", model_dir=str(model_dir), writers=[])
    assert single_device.evaluate()["loss"] == pytest.approx(chief.json["means"]["eval_loss"], abs=1e-6)
    assert single_device.step == 1000


@pytest.mark.slow
def test_two_parameter_servers_resume_a_run_of_one_device_and_only_the_chief_writes(serve, tmp_path):
    single_device = Small(strategy="default", model_dir=str(tmp_path / "job0" / "run"), writers=[])
    single_device.train(5)
    options = {"model_dir": "run", "steps": 300, "steps_per_loop": 7, "tf_data": True, "watched": True}
    job = ServedJob(tmp_path / "job0", asynchronous_program(**options), servers=2)
    directories = {n: tmp_path / n for n in ("ps0", "ps1", "worker0", "worker1")}
    for directory in directories.values():
        directory.mkdir()
    try:
        job.start(directories={**directories, "chief0": tmp_path / "job0"})
        chief = job.result("chief0")
        assert chief.code == 0, chief.output[-3000:]
        wait_for_servers_to_end(job)
    finally:
        job.stop_all()
    assert chief.json["resumed"] == 5 and "joined at 300\n" in chief.output
    assert (chief.json["step"], chief.json["iterations"]) == (300, 300)
    assert chief.json["examples"] == 300 * 24 and chief.json["frozen"] is True
    for directory in directories.values():
        assert not list(directory.iterdir())
    assert (tmp_path / "job0" / "run" / "checkpoints" / "ckpt-300" / "manifest.json").exists()


@pytest.mark.slow
def test_workers_share_the_examples_and_a_convex_problem_reaches_its_optimum(serve):
    job = serve(["tests/programs/asynchronous_data.py"])
    chief = job.result("chief0")
    assert chief.code == 0, chief.output[-3000:]
    for data_case in ("arrays", "dataset", "again"):
        assert chief.json[data_case] == {"most": 1, "all": 320, "step": 40}
    assert chief.json["loss"] == pytest.approx(chief.json["optimum"], rel=1e-5)
    assert chief.json["iterations"] == 300
    steps, batch_size = chief.json["counted"]
    assert steps == 2 * (50 // batch_size)
    for name, error_message in {
        "python": "UsageError: train_data cannot be sent to workers of parameter servers: it calls Py",
        "list": "UsageError: the step returned list; expected a dictionary",
        "endless": "UsageError: train_data is endless and no number of steps was given",
        "file": "UsageError: train_data is sharded by 'file', which parameter servers do not support",
        "nan": "NonFiniteError: Step 1: the loss and the gradient are NaN or infinite.",
    }.items():
        assert chief.json[name].startswith(error_message), chief.json[name]


@pytest.mark.smoke
def test_training_continues_without_a_lost_worker_which_may_rejoin_and_sigterm_saves(serve, tmp_path):
    model_dir = tmp_path / "run"
    command = [*MNIST, "--train_steps=100000", f"--model_dir={model_dir}"]
    job = serve([*command, "--strategy=parameter_server"])
    job.wait_until(lambda: len(logged_steps(model_dir)) > 2)
    job.tasks["worker1"].kill()
    num_logged = len(logged_steps(model_dir))
    job.wait_until(lambda: len(logged_steps(model_dir)) > num_logged + 3)
    job.start("worker1")
    job.wait_until(lambda: job.log("worker1").read_text().count("Serving as") == 2)
    initial_secs = job.cpu_secs("worker1")
    job.wait_until(lambda: job.cpu_secs("worker1") > initial_secs + 0.5)
    num_logged = len(logged_steps(model_dir))
    job.wait_until(lambda: len(logged_steps(model_dir)) > num_logged + 3)
    job.tasks["worker0"].kill()
    num_logged = len(logged_steps(model_dir))
    job.wait_until(lambda: len(logged_steps(model_dir)) > num_logged + 3)
    job.tasks["chief0"].send_signal(signal.SIGTERM)
    chief = job.result("chief0")
    assert chief.code == 143, chief.output[-3000:]
    stopped = int(chief.output.split("Stopped by SIGTERM at step ")[1].split(";")[0])
    newest = max(int(p.name[5:]) for p in (model_dir / "checkpoints").iterdir())
    assert newest == stopped >= max(logged_steps(model_dir))
    assert logged_steps(model_dir) == list(range(5, 5 * len(logged_steps(model_dir)) + 1, 5))
    assert job.result("worker1", LEAVE_SECS).code == job.result("ps0", LEAVE_SECS).code == 0


def test_a_lost_parameter_server_ends_the_chief_with_134(serve, tmp_path):
    model_dir = tmp_path / "run"
    job = serve([*MNIST, "--train_steps=100000", f"--model_dir={model_dir}"])
    job.wait_until(lambda: len(logged_steps(model_dir)) > 2)
    job.tasks["ps0"].kill()
    chief = job.result("chief0")
    assert chief.code == 134, chief.output[-3000:]
    assert "another task has ended or cannot be reached" in chief.output
    for name in ("worker0", "worker1"):
        assert job.result(name, LEAVE_SECS).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["tf_keras", "module"])
def test_variables_in_shards_are_trained_saved_and_restored(serve, tmp_path, framework):
    options = {"framework": framework, "optimizer": "Adam" if framework == "tf_keras" else "adam",
               "variable_partitioner": "fixed_shards:2", "model_dir": str(tmp_path / "run")}  # fmt: skip
    first = serve(asynchronous_program(steps=200, **options), servers=2).result("chief0")
    assert first.code == 0, first.output[-3000:]
    second = serve(asynchronous_program(steps=300, **options), servers=2).result("chief0")
    assert second.code == 0, second.output[-3000:]
    assert (second.json["resumed"], second.json["step"]) == (200, 300)
    assert second.json["means"]["loss"] < first.json["means"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("lock_state", ["holds", "waits for"])
def test_a_worker_lost_while_it_holds_or_awaits_the_lock_blocks_no_other(serve, lock_state, tmp_path):
    update_started = tmp_path / "update"
    job = serve(["tests/programs/holding_the_lock.py", str(update_started)])
    job.wait_until(update_started.exists)
    initial_secs_by_worker = {name: job.cpu_secs(name) for name in ("worker0", "worker1")}

    def used_secs(name):
        return job.cpu_secs(name) - initial_secs_by_worker[name]

    job.wait_until(lambda: max(map(used_secs, initial_secs_by_worker)) > 1)
    waiting, holding = sorted(initial_secs_by_worker, key=used_secs)
    num_steps = steps_counted(job)
    assert num_steps < 999  # the other worker has steps left
    time.sleep(3)  # less than the update takes
    assert steps_counted(job) == num_steps
    job.tasks[holding if lock_state == "holds" else waiting].kill()
    chief = job.result("chief0")
    assert chief.code == 0, chief.output[-3000:]
    assert chief.json["step"] == 1000


def steps_counted(job):
    """Returns the number that the chief has printed last; it prints one every half second."""
    return int(re.findall(r"^counted (\d+)\n", job.log("chief0").read_text(), re.MULTILINE)[-1])


@pytest.mark.slow
def test_keras_3_variables_in_shards_are_refused_before_training(serve):
    job = serve(asynchronous_program(variable_partitioner="max_shards:2,min_size:1"), servers=2)
    chief = job.result("chief0", TIMEOUT_SECS)
    assert (
        chief.code == ctl.UsageError.exit_code and "in 2 shards, which Keras 3 cannot train" in chief.output
    )
    assert issubclass(ctl.UsageError, ctl.CtlError)


@pytest.mark.slow
def test_sigterm_without_any_worker_still_saves(serve, tmp_path):
    model_dir = tmp_path / "run"
    job = serve([*MNIST, "--train_steps=100000", f"--model_dir={model_dir}"])
    job.wait_until(lambda: len(logged_steps(model_dir)) > 2)
    job.tasks["worker0"].kill()
    job.tasks["worker1"].kill()
    job.wait_until(lambda: "failed with UnavailableError" in job.log("chief0").read_text())
    job.tasks["chief0"].send_signal(signal.SIGTERM)
    chief = job.result("chief0")
    assert chief.code == 143, chief.output[-3000:]
