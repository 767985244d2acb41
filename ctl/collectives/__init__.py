"""Collectives runtime of `ctl.hvd`: negotiation of requests between ranks, and transfers over TCP.

Input and output are named tensors and their sums, concatenations or copies. Horovod's API is in `hvd/`.
"""
