"""Between requests and engines: workers prepare prompts, replicas share requests out. Knows no files of a job."""
