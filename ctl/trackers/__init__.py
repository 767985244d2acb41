"""Metric writers for experiment trackers, and identifiers of runs."""
