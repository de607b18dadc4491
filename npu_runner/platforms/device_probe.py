"""Says which devices this host has, and what a process needs in its environment to see only some of them.

Started by npu_runner.processes.commands with PLATFORM NUM_RANKS; prints one line of JSON. Knows no vendor.
"""

from __future__ import annotations

import json

from npu_runner.errors import ConfigError
from npu_runner.platforms import pick_platform


def main(arguments: list[str]) -> None:
    platform_name, num_ranks = arguments[0], int(arguments[1])
    try:
        platform = pick_platform(platform_name)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        return
    num_devices = platform.device_count()
    shares = []
    for first in range(0, num_devices - num_ranks + 1, num_ranks) if platform.name != "cpu" else ():
        devices = range(first, first + num_ranks)
        environment = platform.device_environment(devices, num_devices)
        shares.append({"devices": ",".join(map(str, devices)), "environment": environment})
    print(json.dumps({"platform": platform.name, "num_devices": num_devices, "shares": shares}))
