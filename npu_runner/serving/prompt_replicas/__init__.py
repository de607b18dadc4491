"""One LLM on several groups of devices: prompts go to replicas in processes of this host, answers come back."""
