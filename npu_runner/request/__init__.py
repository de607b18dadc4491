"""Requests and their results: plain data that crosses processes. Needs numpy, nothing else."""
