#!/usr/bin/env bash
# Everything that test.sh does, and the tests that are left out of its fast set. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
TEST_MARKS='' exec bash scripts/test.sh "$@"
