"""Collectives runtime of `ctl.hvd`: negotiation of requests between ranks, and transfers over TCP.

The runtime reduces, concatenates or copies named tensors. Horovod's API is in `hvd/`.
"""
