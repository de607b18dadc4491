"""Run the same call on every rank, wherever the ranks live."""
