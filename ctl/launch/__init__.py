"""Launcher of the processes of one job: start, monitoring and termination. Pure Python.

Two command lines, `ctl launch` (`cli`: roles, restarts) and `ctlrun` (`horovodrun_cli`: horovodrun's
options, elastic jobs), use common parts: hosts → host_allocation → process_group (process, ssh,
output) → monitor (heartbeat_monitor) → supervisor (restart_policy) or rank_job, elastic (membership).
Code that runs in a process of the job does not belong in this package.
"""
