"""Topology on Vertex AI from CLUSTER_SPEC, which every replica of a custom job has, even without TF_CONFIG.

The position of a pool defines its role: the chief, workers, parameter servers or the Reduction Server,
the evaluator (Vertex AI, "Distributed training").
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctl.distribute.platforms import variables
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

CLUSTER_SPEC = "CLUSTER_SPEC"
VERTEX_AI = "Vertex AI"
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_EXAMPLE = (
    '{"cluster": {"workerpool0": ["host1:2222"], "workerpool1": ["host2:2222"]}, '
    '"task": {"type": "workerpool0", "index": 0}}'
)
_KEYS = ("cluster", "task", "environment", "job", "trial")
_REDUCTION_SERVER = "reductionserver"  # in the name of its image


@dataclass(frozen=True)
class OtherPools:
    """Information of CLUSTER_SPEC that is missing in TF_CONFIG."""

    sources: tuple[str, ...] = ()
    has_evaluator: bool = False
    has_reduction_server: bool = False


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from CLUSTER_SPEC, or None if it is not set or empty. Raises UsageError."""
    spec = variables.parsed(environ, CLUSTER_SPEC, _EXAMPLE)
    if spec is None:
        return None
    _check_spec_keys(spec)
    cluster = spec.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise UsageError(f"CLUSTER_SPEC's cluster is {cluster!r}; expected addresses by pool.")
    named = {_pool(pool): addresses for pool, addresses in cluster.items() if addresses}
    notes: tuple[str, ...] = ()
    if _has_reduction_server(spec) and named.pop("ps", ()):
        notes = ("The Reduction Server's pool is left out of the cluster: it runs no training.",)
    tasks = variables.checked_tasks(named, CLUSTER_SPEC)
    task = spec.get("task")
    if isinstance(task, dict) and "type" in task:
        task = {**task, "type": _pool(task["type"])}
    if not tasks:
        return Topology(platform=VERTEX_AI, sources=(CLUSTER_SPEC,))
    task_type, index = variables.checked_task(task, tasks, CLUSTER_SPEC)
    return Topology(
        tasks,
        task_type,
        index,
        platform=VERTEX_AI,
        sources=(CLUSTER_SPEC,),
        has_evaluator="evaluator" in named,
        ends_with_chief=True,
        notes=notes,
    )


def _check_spec_keys(spec: Mapping[str, Any]) -> None:
    """Raises UsageError for a misspelt key. Keys that resemble no known one may come from the platform."""
    misspelt = {k: v for k, v in spec.items() if k not in _KEYS and variables.nearest(k, _KEYS)}
    if spec and "cluster" not in spec:
        misspelt = dict(spec)
    variables.check_keys(misspelt, _KEYS, CLUSTER_SPEC)
    if spec and "cluster" not in spec:
        raise UsageError(f"CLUSTER_SPEC has {', '.join(spec)}, but no cluster; expected e.g. {_EXAMPLE}.")


def read_other_pools(environ: Mapping[str, str], tf_config: Mapping[str, Any]) -> OtherPools:
    """Returns facts about pools that TF_CONFIG does not list, from CLUSTER_SPEC or the job in TF_CONFIG."""
    try:
        spec = variables.parsed(environ, CLUSTER_SPEC, _EXAMPLE) or {}
    except UsageError:
        spec = {}
    cluster = spec.get("cluster")
    pools = cluster if isinstance(cluster, dict) else {}
    specs = _pool_specs(spec) or _pool_specs(tf_config)
    has_evaluator = bool(pools.get("workerpool3")) or (len(specs) > 3 and bool(specs[3]))
    reduces = _has_reduction_server(spec) or _has_reduction_server(tf_config)
    return OtherPools((CLUSTER_SPEC,) if spec else (), has_evaluator, reduces)


def _pool(name: Any) -> str:
    if not isinstance(name, str) or name not in _POOLS:
        raise UsageError(
            f"CLUSTER_SPEC has the pool {name!r}; expected {', '.join(_POOLS)}, as Vertex AI names them."
        )
    return _POOLS[name]


def _pool_specs(spec: Mapping[str, Any]) -> list:
    """Returns the pools of the submitted job; [] if the job is not described."""
    described = spec.get("job")
    if isinstance(described, str):
        try:
            described = variables.json_of(described)
        except ValueError:
            return []
    if not isinstance(described, dict):
        return []
    inner = described.get("jobSpec") or described.get("job_spec") or described
    pools = inner.get("workerPoolSpecs") or inner.get("worker_pool_specs") or []
    return pools if isinstance(pools, list) else []


def _has_reduction_server(spec: Mapping[str, Any]) -> bool:
    specs = _pool_specs(spec)
    return len(specs) > 2 and _REDUCTION_SERVER in json.dumps(specs[2])
