"""`ctl deploy vertex`: a custom job, or a tuning job, for Vertex AI."""
