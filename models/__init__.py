"""Example models for new projects. They use only the public modules of `ctl`."""
