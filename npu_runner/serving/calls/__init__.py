"""What answers the calls of an `LLM`: whose turn it is, prompts to be prepared, one engine here or several replicas."""
