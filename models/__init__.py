"""Models to learn from and to start with; each uses only `import ctl`."""
