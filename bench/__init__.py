"""Programs that measure: `python -m bench.device`, from a checkout. They print a table, then one line of JSON.

They measure the npu_runner that PYTHONPATH names, else the one that is installed.
"""

import os
import sys

# `python -m` puts the working directory first, and its npu_runner would hide that of a tree named by PYTHONPATH.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
