"""Grammars for answers: checked where rows are prepared, followed where tokens are sampled. Imports no torch."""
