"""Checkpoints: tracked variables, saving, verification, restoring, retention and export of models.

The schedule of saves belongs to `training/`.
"""
