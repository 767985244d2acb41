"""Input data: global batches split into replica batches, with an exact position for resuming.

This folder converts a dataset or arrays of the user to an iterator. It does not use steps or models.
"""
