"""Custom jobs and tuning jobs for Vertex AI: `ctl deploy vertex`."""
