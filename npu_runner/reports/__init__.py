"""Looks at a job from outside: reads its files, and changes none of them. Knows nothing of how a job runs."""
