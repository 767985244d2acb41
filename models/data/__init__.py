"""Readers of data sets for the example models."""
