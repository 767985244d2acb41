"""`ctl deploy kubernetes`: a training job with its service, policies, storage and TensorBoard."""
