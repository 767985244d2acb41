"""Deployment files for training jobs, generated from one command line: `ctl deploy`.

`args`, `validators` and `secret_check` parse and check the command line. The module of a platform computes
the values, `manifest` inserts them into the files of templates/, and `output` writes the result. Facts that
a platform checks itself (machine types, regions, limits) do not belong here. No module imports TensorFlow.
Only `--submit` sends a request.
"""
