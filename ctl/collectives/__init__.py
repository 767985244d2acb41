"""The engine of `ctl.hvd`: ranks agree on names and shapes, then tensors travel over TCP.

Horovod's API belongs to `hvd/`. Named tensors come in, sums, gathered or broadcast ones go out.
"""
