"""Processes that prepare prompts beside the model. They know nothing of rows, files or the model."""
