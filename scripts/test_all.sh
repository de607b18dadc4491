#!/usr/bin/env bash
# Everything that test.sh does, and the tests that are left out of its fast set; then what serves once more with two steps
# under way (docs/architecture.md); then the oldest packages that are supported, in environments of their own. Arguments go to
# the first. It stops at the first part that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
TEST_MARKS='' bash scripts/test.sh "$@"
.venv/bin/python -m pytest --numprocesses "${TEST_PROCESSES:-3}" --dist loadscope --no-loadscope-reorder \
    --async-scheduling tests/oracle tests/runner tests/faults -m "not full"
bash scripts/test_environments.sh
