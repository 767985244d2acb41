"""Dockerfile of one program: `ctl deploy docker`."""
