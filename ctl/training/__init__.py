"""One run of a trainer: data, loop over steps, logs, evaluations, saves and callbacks.

The order of these actions and the calls of user code are defined here. Steps, data, checkpoints and
metrics are in other folders.
"""
