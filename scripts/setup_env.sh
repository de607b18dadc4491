#!/usr/bin/env bash
# Makes .venv in the checkout, with the package and what it needs. Does nothing when that is already there.
# usage: setup_env.sh [dev]     dev: also what tests and checks need
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=requirements.txt
[ "${1:-}" = dev ] && requirements="requirements-dev.txt"

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.10, 3.11 or 3.12 is needed, and none was found on PATH" >&2
    return 1
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    "$python" -m venv .venv
fi
# One stamp per list: it holds what was installed, so that a changed list installs again.
stamp=".venv/installed-$requirements"
wanted=$(cat requirements.txt "$requirements" pyproject.toml)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "installing $requirements into .venv (minutes on the first run)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
    printf '%s' "$wanted" >"$stamp"
fi
