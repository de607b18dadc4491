"""`python -m npu_runner` is the `npu-runner` command."""

import sys

from npu_runner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
