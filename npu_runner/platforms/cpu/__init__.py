"""The CPU platform, which runs everywhere. Knows no other platform."""
