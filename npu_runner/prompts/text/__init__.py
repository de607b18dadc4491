"""Chat templates, tools, tokens. May know that a message holds media, not how they are read."""
