"""Views of a job from outside: its status, its summary over all runs, and its report."""
