"""Checkpoints: which variables, saving, verifying, restoring, keeping, exporting.

When to save belongs to `training/`. The variables of a trainer come in, directories go out.
"""
