"""What `npu-runner doctor` looks at on an Ascend host, and the remedy for each finding. Imports no torch."""
