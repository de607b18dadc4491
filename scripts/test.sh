#!/usr/bin/env bash
# Lint, types and all tests; makes the environment if needed. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh dev

echo "== ruff"
.venv/bin/ruff check .
echo "== mypy"
.venv/bin/mypy
if command -v shellcheck >/dev/null; then
    echo "== shellcheck"
    shellcheck scripts/*.sh .ci/run
fi
echo "== pytest"
.venv/bin/python -m pytest "$@"
