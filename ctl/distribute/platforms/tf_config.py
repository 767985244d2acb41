"""Topology from TF_CONFIG in the variants of different platforms.

Vertex AI never lists the evaluator in the cluster, Kubeflow's TFJob does. Old runtimes call the chief
`master`. Both platforms set `"environment": "cloud"`.
"""

from collections.abc import Mapping

from ctl.distribute.platforms import variables, vertex
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

TF_CONFIG = "TF_CONFIG"
# TensorFlow reads the first nine, Vertex AI adds `job` and `trial`, Kubeflow's TFJob `sparseCluster`
_KEYS = (
    "cluster",
    "task",
    "environment",
    "rpc_layer",
    "session_master",
    "eval_session_master",
    "master",
    "service",
    "model_dir",
    "job",
    "trial",
    "sparseCluster",
)


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from TF_CONFIG, or None if it is not set or empty. Raises UsageError.

    An additional CLUSTER_SPEC (Vertex AI) specifies if there is an evaluator, and if the pool of parameter
    servers is the Reduction Server.
    """
    config = variables.parsed(environ, TF_CONFIG, variables.TF_CONFIG_EXAMPLE)
    if config is None:
        return None
    if "sparseCluster" in config:
        raise UsageError(
            "TF_CONFIG has a sparseCluster, of a TFJob with dynamic workers; expected a fixed cluster. "
            "Leave enableDynamicWorker out of the TFJob."
        )
    variables.check_keys(config, _KEYS, TF_CONFIG)
    task = config.get("task")
    is_evaluator = isinstance(task, dict) and task.get("type") == "evaluator"
    if config and "cluster" not in config and not is_evaluator:
        raise UsageError(
            f"TF_CONFIG has {', '.join(config)}, but no cluster; expected e.g. "
            f"{variables.TF_CONFIG_EXAMPLE}. For a process that trains alone, unset TF_CONFIG."
        )
    cluster = config.get("cluster") or {}
    if isinstance(cluster, dict) and any(cluster.values()):
        cluster = {task_type: addresses for task_type, addresses in cluster.items() if addresses != []}
    platform = _platform(environ, config)
    if not cluster and not is_evaluator:
        return Topology(platform=platform, sources=(TF_CONFIG,))
    tasks = variables.checked_tasks(cluster, TF_CONFIG)
    pools = vertex.read_other_pools(environ, config)
    notes = []
    if pools.has_reduction_server and tasks.pop("ps", ()):
        notes.append("The Reduction Server's pool is left out of the cluster: it runs no training.")
    task_type, index = variables.checked_task(task, tasks, TF_CONFIG)
    return Topology(
        tasks,
        task_type,
        index,
        platform=platform,
        sources=(TF_CONFIG, *pools.sources),
        has_evaluator="evaluator" in tasks or pools.has_evaluator,
        ends_with_chief=config.get("environment") == "cloud",
        notes=tuple(notes),
    )


def _platform(environ: Mapping[str, str], config: dict) -> str:
    if vertex.CLUSTER_SPEC in environ or "CLOUD_ML_JOB_ID" in environ:
        return vertex.VERTEX_AI
    if "SM_HOSTS" in environ:
        return "SageMaker"
    if config.get("environment") == "cloud" and "KUBERNETES_SERVICE_HOST" in environ:
        return "Kubeflow TFJob"
    return "TF_CONFIG"
