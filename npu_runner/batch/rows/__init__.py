"""The rows of the input and of the output. Knows nothing of files or jobs."""
