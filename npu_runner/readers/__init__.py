"""Readers: what each page reader is asked, and how its answers are read."""
