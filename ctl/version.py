"""The version of `ctl`; read by the command line without importing anything else."""

__version__ = "0.1.0"
