"""Top-level packages for `ctlrun --as-horovod`, which puts this folder first on PYTHONPATH."""
