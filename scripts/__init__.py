"""Programs that a user or CI starts."""
