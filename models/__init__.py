"""Example models to learn from and to copy. They use only the public modules of `ctl`."""
