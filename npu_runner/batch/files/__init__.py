"""Input, output, manifest, and how they survive a death. Knows nothing of what is in a row but its name."""
