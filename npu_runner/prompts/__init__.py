"""A conversation, a text or token ids in; `PromptInputs` out: what a worker process does. Knows no network."""
