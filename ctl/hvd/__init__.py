"""Horovod's API: `import ctl.hvd as hvd`."""
