"""What acts on the numbers of a run: early stopping, learning rate, best model; and when things are due.

Carrying a decision out on all workers belongs to `training/`. Numbers come in, decisions go out.
"""
