"""Programs that tests run in a subprocess, with the real torch_npu on the emulated CANN."""
