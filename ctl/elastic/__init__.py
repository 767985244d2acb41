"""Training that continues in the same processes when workers leave or join."""
