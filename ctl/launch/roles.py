"""The roles of the processes of a job, and the names of processes and logs.

chief, worker    train together: when one fails, all end
ps, worker       of a job with parameter servers: they serve the chief, who trains
evaluator        evaluates checkpoints: its end is never the end of the job
"""

from ctl.distribute.topology import Topology


def serves(task: Topology) -> bool:
    """True for a process without state to save, which ends when the chief is done."""
    return "ps" in task.tasks and task.task_type in ("ps", "worker")


def is_expendable(task: Topology) -> bool:
    """True for a process without which training goes on."""
    return task.task_type == "evaluator" or (serves(task) and task.task_type == "worker")


def task_name(task: Topology) -> str:
    """The name of a process in messages, e.g. "worker 1 (job 2)" or "ps 0"; the job is its log's number."""
    name = f"{task.task_type} {task.task_index}"
    return name if task.task_type in ("ps", "evaluator") else f"{name} (job {task.worker_index})"


def log_name(task: Topology) -> str:
    """The file name of its log: job_0.log is the chief's, then the workers'; ps_0.log, ..."""
    if task.task_type in ("ps", "evaluator"):
        return f"{task.task_type}_{task.task_index}.log"
    return f"job_{task.worker_index}.log"


def trains(task: Topology) -> bool:
    """True for a process that takes part in every step: chief and workers without parameter servers."""
    return task.task_type in ("chief", "worker") and not serves(task)
