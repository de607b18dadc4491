"""Requests in, finished requests out: scheduling, execution on every rank, text."""
