"""Commands and environments of the processes that each platform starts for a manifest.

Only host names, gs://bucket and mounts are replaced, by loopback addresses and a folder. The
variables are as the platforms' documentation and source show them.
"""

import json
import re
from dataclasses import dataclass, field

import yaml
from regenerate import manifest

IMAGE = "--image=us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"


@dataclass
class Process:
    """One container: its command and its environment variables."""

    role: str  # "chief", "worker" or "evaluator"
    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)


def vertex(program: list[str], directory: str) -> list[Process]:
    """Returns processes of custom training: CLUSTER_SPEC in all, and TF_CONFIG without the evaluator."""
    pools = yaml.safe_load(manifest([
        "vertex", IMAGE, "--workers=2", "--evaluator", "--base_output=gs://my-bucket/job", "--", *program,
    ]))["workerPoolSpecs"]  # fmt: skip
    counts = {f"workerpool{i}": pool.get("replicaCount", 0) for i, pool in enumerate(pools)}
    cluster = {
        name: [f"cmle-training-{name}-ab-{i}:2222" for i in range(count)]
        for name, count in counts.items() if count
    }  # fmt: skip
    kinds = {"workerpool0": "chief", "workerpool1": "worker", "workerpool3": "evaluator"}
    listed = {kinds[name]: hosts for name, hosts in cluster.items() if name != "workerpool3"}
    directories = {
        "AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs",
    }  # fmt: skip
    processes = []
    for i, pool in enumerate(pools):
        for index in range(pool.get("replicaCount", 0)):
            container = pool["containerSpec"]
            task = {"type": f"workerpool{i}", "index": index, "trial": ""}
            spec = {"cluster": cluster, "environment": "cloud", "task": task}
            own_task = {"type": kinds[f"workerpool{i}"], "index": index, "trial": "", "cloud": "ab"}
            config = {"cluster": listed, "environment": "cloud", "task": own_task}
            environ = {name: f"{directory}/job/{d}/" for name, d in directories.items()}
            environ |= {"CLUSTER_SPEC": json.dumps(spec), "TF_CONFIG": json.dumps(config)}
            environ |= {e["name"]: e["value"] for e in container.get("env", [])}
            processes.append(Process(own_task["type"], container["command"] + container["args"], environ))
    return processes


def vertex_by_cluster_spec(program: list[str], directory: str) -> list[Process]:
    """Returns processes of custom training without TF_CONFIG."""
    processes = vertex(program, directory)
    for process in processes:
        del process.environ["TF_CONFIG"]
    return processes


def _documents(flavor: str, program: list[str], directory: str) -> list[dict]:
    options = ["kubernetes", IMAGE, f"--flavor={flavor}", "--workers=2", "--evaluator", "--claim=data"]
    program = [*program, f"--model_dir={directory}/job"]
    return list(yaml.safe_load_all(manifest([*options, f"--mount={directory}", "--", *program])))


def _process(role: str, template: dict, **variables: str) -> Process:
    [container] = template["spec"]["containers"]
    environ = {e["name"]: e["value"] for e in container.get("env", [])}
    return Process(role, container["command"] + container["args"], environ | variables)


def kubernetes(program: list[str], directory: str) -> list[Process]:
    """Returns pods of an indexed Job, and of the evaluator's Job with one pod."""
    processes = []
    for job in (d for d in _documents("job", program, directory) if d["kind"] == "Job"):
        spec = job["spec"]
        for i in range(spec.get("completions", 1)):
            indexed = {"JOB_COMPLETION_INDEX": str(i)} if spec.get("completionMode") == "Indexed" else {}
            role = ("chief", "worker")[i] if indexed else "evaluator"
            processes.append(_process(role, spec["template"], **indexed))
    return processes


def tfjob(program: list[str], directory: str) -> list[Process]:
    """Returns pods of a TFJob. The training operator sets TF_CONFIG, with the evaluator in the cluster."""
    [job] = [d for d in _documents("tfjob", program, directory) if d["kind"] == "TFJob"]
    name, replicas = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    cluster = {
        replica.lower(): [f"{name}-{replica.lower()}-{i}.default.svc:2222" for i in range(spec["replicas"])]
        for replica, spec in replicas.items()
    }  # fmt: skip
    processes = []
    for replica, spec in replicas.items():
        for i in range(spec["replicas"]):
            task = {"type": replica.lower(), "index": i}
            config = {"cluster": cluster, "task": task, "environment": "cloud"}
            processes.append(_process(replica.lower(), spec["template"], TF_CONFIG=json.dumps(config)))
    return processes


def trainjob(program: list[str], directory: str) -> list[Process]:
    """Returns pods of a TrainJob: the nodes of an indexed Job, and the evaluator's separate Job."""
    documents = _documents("trainjob", program, directory)
    [job] = [d for d in documents if d["kind"] == "TrainJob"]
    trainer = job["spec"]["trainer"]
    environ = {e["name"]: e["value"] for e in trainer.get("env", [])}
    nodes = [
        Process(("chief", "worker")[i], trainer["command"] + trainer["args"],
                {**environ, "JOB_COMPLETION_INDEX": str(i)})
        for i in range(trainer["numNodes"])
    ]  # fmt: skip
    [evaluator] = [d for d in documents if d["kind"] == "Job"]
    return [*nodes, _process("evaluator", evaluator["spec"]["template"])]


ALL = {f.__name__: f for f in (vertex, vertex_by_cluster_spec, kubernetes, tfjob, trainjob)}
ENDS_WITH_CHIEF = ("vertex", "vertex_by_cluster_spec", "tfjob")  # then the remaining processes are ended
_ADDRESS = re.compile(r'[a-z][-a-z0-9.]*:2222(?=[",]|$)')


def on_loopback(processes: list[Process], free_port) -> None:
    """Replaces each address of the platform by a local port of `free_port()`."""
    new_address: dict[str, str] = {}
    for process in processes:
        for name, value in process.environ.items():
            for address in _ADDRESS.findall(value):
                if address not in new_address:
                    new_address[address] = f"127.0.0.1:{free_port()}"
            process.environ[name] = _ADDRESS.sub(lambda m: new_address[m[0]], value)
    assert len(new_address) >= 2, "no addresses were found"
