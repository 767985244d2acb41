"""The `ctlrun` command: starts a script once per rank, as users of horovodrun know it."""
