"""What a row of the input asks for and what an answer looks like. Knows nothing of files or jobs."""
