"""Reducers: the ways in which gradients of replicas become the gradients to apply.

A reducer is one file with a subclass of `GradientReducer` and one line in `registry.py`.
"""
