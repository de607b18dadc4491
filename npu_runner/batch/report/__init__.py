"""Pages over the answers of a job, made for looking. Knows nothing of how a job runs."""
