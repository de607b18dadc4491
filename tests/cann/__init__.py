"""The emulated CANN and its own tests; README.md says how it works."""
