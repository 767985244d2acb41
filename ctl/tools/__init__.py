"""Commands that look at a machine or a run and change nothing: `ctl doctor`, `ctl inspect`.

What they show is computed elsewhere. Nothing here is imported by a training run.
"""
