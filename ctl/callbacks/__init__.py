"""Callbacks, such as early stopping and saving of the best model, and the intervals of actions.

This folder receives metrics and returns decisions. The folder `training/` executes the decisions on all
workers.
"""
