"""Folders and tables become rows, answers become tables: commands beside the job, with files between them."""
