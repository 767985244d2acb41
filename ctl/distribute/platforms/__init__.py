"""Where a process runs: what each platform's environment variables say of a job. No TensorFlow."""
