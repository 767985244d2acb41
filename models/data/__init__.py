"""Data for the models: where it comes from and how it is read."""
