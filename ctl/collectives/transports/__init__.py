"""Transports: links between two ranks over sockets, shared memory or MPI. `registry` lists them."""
