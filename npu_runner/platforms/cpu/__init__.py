"""The CPU: the embedded default that anybody can try."""
