"""Starts the workers of one job, watches them and ends them together; pure Python."""
