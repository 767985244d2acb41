"""`ctl deploy docker`: a Dockerfile for one program."""
