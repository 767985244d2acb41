"""The runtime below the collectives: sockets, negotiation, rings."""
