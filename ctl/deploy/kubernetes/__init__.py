"""Training jobs for Kubernetes with service, policies, storage and TensorBoard: `ctl deploy kubernetes`."""
