"""The batch job: a JSONL file of requests in, a JSONL file of answers out. Importing it imports no torch."""
