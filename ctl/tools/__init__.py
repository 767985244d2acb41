"""Commands that read the state of a machine or a run without changing it: `ctl doctor`, `ctl inspect`.

They print values that other packages compute. A training run does not import this package.
"""
