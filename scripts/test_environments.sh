#!/usr/bin/env bash
# Tests in environments of their own, below .cache/environments, which it makes; part of test_all.sh.
# usage: test_environments.sh [lowest | oracle]...     both
#   lowest: the oldest packages that pyproject.toml admits (requirements-lowest.txt). Every test that needs no transformers,
#           as tests/without_oracle.py lists them, and the demo; `import transformers` is an error there.
#   oracle: the oldest transformers of the tests (requirements-oracle.txt), with what it asks for. The fast set.
# TEST_MARKS, TEST_PROCESSES: as of test.sh. PYTHON: of both; `lowest` needs Python 3.10 to 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."

# Runs pytest in the environment $1, with the other arguments.
run_tests() {
    local python=.cache/environments/$1/bin/python
    shift
    "$python" -m pytest --numprocesses "${TEST_PROCESSES:-3}" --dist loadscope --no-loadscope-reorder \
        -m "${TEST_MARKS-not full}" "$@"
}

test_lowest() {
    local environment=.cache/environments/lowest site
    PYTHON=${PYTHON:-python3.12 python3.11 python3.10} bash scripts/setup_env.sh lowest
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp tests/refuse_transformers.py "$site"
    echo "import refuse_transformers" >"$site/refuse_transformers.pth"
    "$environment/bin/python" -m tests.without_oracle >"$environment/tests.txt"
    run_tests lowest "@$environment/tests.txt"
    ENVIRONMENT=$environment bash scripts/demo.sh
}

test_oracle() {
    bash scripts/setup_env.sh oracle
    run_tests oracle
}

[ $# -gt 0 ] || set -- lowest oracle
for name in "$@"; do
    case $name in
        lowest | oracle) ;;
        *) echo "test_environments.sh: '$name' is no environment; name lowest, oracle, or none for both" >&2 && exit 2 ;;
    esac
done
for name in "$@"; do
    echo "== environment $name"
    "test_$name"
done
