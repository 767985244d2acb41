"""What a manifest starts, started here: its words and variables, with addresses of this machine."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from regenerate import manifest

pytestmark = pytest.mark.workers
PROGRAM = ["--", "python", "-m", "models.mnist", "--train_steps=6", "--global_batch_size=32",
           "--steps_per_loop=3", "--log_every_steps=3", "--save_every_steps=3",
           "--export=none"]  # fmt: skip


def start(container, log, **told):
    """One container: its command with this Python, its variables, and what the platform tells it."""
    words = [sys.executable, *container["command"][1:], *container["args"]]
    own = {e["name"]: e["value"] for e in container.get("env", [])}
    with log.open("wb") as file:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env={**environment(), **own, **told},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def ended():
    """Processes to be gone at the end of the test."""
    processes = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait(TIMEOUT_SECS)


def losses(path):
    """step -> loss, as a report of one run has them."""
    return {r["step"]: r["loss"] for r in map(json.loads, path.read_text().splitlines())}


def alone(tmp_path):
    """The losses of the same program in one process."""
    model_dir = tmp_path / "alone"
    words = [sys.executable, *PROGRAM[2:], f"--model_dir={model_dir}", "--mode=train"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), timeout=TIMEOUT_SECS, check=False)
    assert done.returncode == 0
    return pytest.approx(losses(model_dir / "metrics.jsonl"), rel=1e-4)


def test_the_pods_of_a_job_find_each_other_and_the_evaluator_sees_their_checkpoints(
    tmp_path, ended
):
    model_dir = tmp_path / "shared" / "digits"
    options = ["--image=registry/digits:1", "--workers=2", "--evaluator", "--storage=1Gi",
               f"--mount={tmp_path}/shared"]  # fmt: skip
    text = manifest(["kubernetes", *options, *PROGRAM, f"--model_dir={model_dir}"])
    for i, port in enumerate(free_ports(2)):
        assert f"digits-{i}.digits:2222" in text
        text = text.replace(f"digits-{i}.digits:2222", f"127.0.0.1:{port}")
    jobs = [d for d in yaml.safe_load_all(text) if d["kind"] == "Job"]
    for job in jobs:
        [container] = job["spec"]["template"]["spec"]["containers"]
        for i in range(job["spec"].get("completions", 1)):
            log = tmp_path / f"{job['metadata']['name']}-{i}.log"
            index = {"JOB_COMPLETION_INDEX": str(i)} if "completions" in job["spec"] else {}
            ended.append(start(container, log, **index))
    codes = [process.wait(TIMEOUT_SECS) for process in ended]
    assert codes == [0, 0, 0], "".join(p.read_text()[-1500:] for p in tmp_path.glob("*.log"))
    assert list(losses(model_dir / "evaluations.jsonl")) == [3, 6]
    assert losses(model_dir / "metrics.jsonl") == alone(tmp_path)


def test_the_pools_of_a_custom_job_train_together_and_the_chief_waits_for_the_evaluator(
    tmp_path, ended
):
    """As Vertex AI tells its replicas ("Distributed training"); it ends all of them with the chief."""
    model_dir = tmp_path / "digits"
    options = ["--image=registry/digits:1", "--workers=2", "--evaluator"]
    spec = yaml.safe_load(manifest(["vertex", *options, *PROGRAM, f"--model_dir={model_dir}"]))
    pools = [(i, p) for i, p in enumerate(spec["workerPoolSpecs"]) if p]
    ports = iter(free_ports(sum(p["replicaCount"] for _, p in pools)))
    addresses = {
        f"workerpool{i}": [f"127.0.0.1:{next(ports)}" for _ in range(p["replicaCount"])]
        for i, p in pools
    }
    roles = {"workerpool0": "chief", "workerpool1": "worker", "workerpool3": "evaluator"}
    tf_cluster = {roles[k]: v for k, v in addresses.items() if k != "workerpool3"}
    for i, pool in pools:
        task = {"type": f"workerpool{i}", "index": 0, "trial": ""}
        told = {"cluster": addresses, "environment": "cloud", "task": task, "job": spec}
        tf_task = {**task, "type": roles[task["type"]]}
        ended.append(start(
            pool["containerSpec"], tmp_path / f"pool{i}.log", CLUSTER_SPEC=json.dumps(told),
            TF_CONFIG=json.dumps({**told, "cluster": tf_cluster, "task": tf_task}),
        ))  # fmt: skip
    assert ended[0].wait(TIMEOUT_SECS) == 0, (tmp_path / "pool0.log").read_text()[-3000:]
    for process in ended[1:]:
        process.kill()
    assert list(losses(model_dir / "evaluations.jsonl")) == [3, 6]
    assert losses(model_dir / "metrics.jsonl") == alone(tmp_path)
