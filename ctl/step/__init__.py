"""One step on one replica: forward, gradients, update, and the numbers that it returns.

The loop around it belongs to `training/`, its batches to `data/`. A replica's batch comes in, sums go out.
"""
