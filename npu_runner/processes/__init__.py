"""Other processes of ours: started, watched, named at their end, talked to. Knows nothing of what they do."""
