"""The `npu-runner` command: a file for each subcommand. Nothing above imports it."""
