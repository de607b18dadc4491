"""The doctor's checks of an Ascend host, and the remedy for each finding. Imports no torch."""
