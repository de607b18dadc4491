#!/usr/bin/env bash
# Lint, types and the fast set of tests, which CI runs; makes the environment if needed. Arguments go to pytest.
# Tests that are left to test_all.sh have the mark full("why"): pytest -m full --collect-only lists them.
# --changed [BASE], as the first argument: only the tests that the changes since BASE (HEAD) can reach.
# TEST_PROCESSES: how many processes share the test files (4: some wait); 0 runs them in one, for a debugger.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh dev

has_tests=1
if [ "${1-}" = --changed ]; then
    shift
    base=HEAD
    if [ $# -gt 0 ] && git rev-parse --quiet --verify "$1^{commit}" >/dev/null; then
        base=$1
        shift
    fi
    reached=$(.venv/bin/python -m scripts.changed_tests "$base")
    [ -n "$reached" ] || has_tests=
    echo "== tests that the changes since $base can reach: ${reached:-none}"
    mapfile -t files <<<"$reached"
    set -- "${files[@]}" "$@"
fi

echo "== ruff"
.venv/bin/ruff check .
if command -v shellcheck >/dev/null; then
    echo "== shellcheck"
    shellcheck scripts/*.sh scripts/deploy/*.sh .ci/run
fi
echo "== pytest, and mypy beside it"
types=$(mktemp)
trap 'rm -f "$types"' EXIT
.venv/bin/mypy >"$types" 2>&1 &
mypy=$!
failed=0
[ -z "$has_tests" ] || .venv/bin/python -m pytest --numprocesses "${TEST_PROCESSES:-4}" --dist loadscope --no-loadscope-reorder \
    -m "${TEST_MARKS-not full}" "$@" || failed=$?
echo "== mypy"
wait "$mypy" || failed=1
cat "$types"
exit "$failed"
