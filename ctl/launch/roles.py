"""What the processes of a job are for, and what they and their logs are called.

chief, worker    train together: when one fails, all end
ps, worker       of a job with parameter servers: they serve the chief, who trains
evaluator        looks on: its end is never the end of the job
"""

from ctl.distribute.cluster import Cluster


def serves(task: Cluster) -> bool:
    """True for what holds no state worth a goodbye and ends when the chief is done."""
    return "ps" in task.tasks and task.task_type in ("ps", "worker")


def may_die(task: Cluster) -> bool:
    """True for those without which training goes on."""
    return task.task_type == "evaluator" or (serves(task) and task.task_type == "worker")


def name(task: Cluster) -> str:
    """How messages call a process, e.g. "worker 1 (job 2)" or "ps 0"; the job is its log's number."""
    called = f"{task.task_type} {task.task_index}"
    return (
        called if task.task_type in ("ps", "evaluator") else f"{called} (job {task.worker_index})"
    )


def log_name(task: Cluster) -> str:
    """The file name of its log: job_0.log is the chief's, then the workers'; ps_0.log, ..."""
    if task.task_type in ("ps", "evaluator"):
        return f"{task.task_type}_{task.task_index}.log"
    return f"job_{task.worker_index}.log"


def trains(task: Cluster) -> bool:
    """True for what takes part in every step: chief and workers, not what serves or looks on."""
    return task.task_type in ("chief", "worker") and not serves(task)
