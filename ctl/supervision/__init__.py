"""Heartbeats, leases of model directories, signals and identities of processes. Pure Python.

The reactions to them belong to `launch/` and `training/`.
"""
