"""Signs of life and of ownership: heartbeats, leases, signals, and which process is which.

What the owner of a job does with them belongs to `launch/` and `training/`. Pure Python.
"""
