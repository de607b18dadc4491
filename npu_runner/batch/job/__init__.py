"""The job: its loop, its tally, its progress and its report."""
