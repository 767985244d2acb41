"""Top-level packages for `ctlrun --as-horovod`, which adds this folder at the start of PYTHONPATH."""
