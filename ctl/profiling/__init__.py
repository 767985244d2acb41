"""Measurement of steps: the trace of `--profile`, `ctl profile`, and detection of slow workers."""
