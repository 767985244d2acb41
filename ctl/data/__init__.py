"""Data: global batches in, each replica's batches out, with an exact position to resume from.

Steps and models do not belong here. A dataset or arrays of the user come in, an iterator goes out.
"""
