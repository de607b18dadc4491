"""What a job would bring, before it is run."""
