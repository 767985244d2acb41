"""Roles of the processes of a job, and names of processes and logs.

chief, worker    train synchronously: the failure of one ends all
ps, worker       of a job with parameter servers: they are servers of the chief, which trains
evaluator        evaluates checkpoints: its failure does not end the job
"""

from ctl.distribute.topology import Topology


def is_server(task: Topology) -> bool:
    """Returns True for a process without state to save, which ends when the chief has succeeded."""
    return "ps" in task.tasks and task.task_type in ("ps", "worker")


def is_expendable(task: Topology) -> bool:
    """Returns True for a process that training does not require."""
    return task.task_type == "evaluator" or (is_server(task) and task.task_type == "worker")


def task_name(task: Topology) -> str:
    """Returns the name for messages, such as "worker 1 (job 2)" or "ps 0". The log has the job number."""
    name = f"{task.task_type} {task.task_index}"
    return name if task.task_type in ("ps", "evaluator") else f"{name} (job {task.worker_index})"


def log_name(task: Topology) -> str:
    """Returns the file name of the log: job_0.log for the chief, then the workers; ps_0.log, ..."""
    if task.task_type in ("ps", "evaluator"):
        return f"{task.task_type}_{task.task_index}.log"
    return f"job_{task.worker_index}.log"


def is_training_task(task: Topology) -> bool:
    """Returns True for a process that participates in every step: chief and workers without servers."""
    return task.task_type in ("chief", "worker") and not is_server(task)
