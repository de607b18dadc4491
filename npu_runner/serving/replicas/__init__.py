"""One model on several groups of devices: what a replica is, where it may run, how rows are shared out."""
