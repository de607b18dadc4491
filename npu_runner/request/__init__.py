"""What a request is, and what comes back for it: plain data that crosses processes. Needs numpy, nothing else."""
