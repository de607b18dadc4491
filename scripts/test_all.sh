#!/usr/bin/env bash
# Everything that test.sh does, and the tests that are left out of its fast set; then what serves once more with two steps
# under way (docs/architecture.md); then the oldest packages that are supported, in environments of their own. Arguments go to
# the first. It stops at the first part that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
# Real PDFs, which tests of pages read (tests/prompts/real_documents.py): once, and only where the packages can be had.
if [ ! -e .cache/documents ]; then
    mkdir -p .cache/documents
    .venv/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest .cache/documents pypdf==7.1.1 ocrmypdf==17.13.0 ||
        echo "test_all.sh: no sdists of pypdf and ocrmypdf; their PDFs are not tested"
    (cd .cache/documents && apt-get download --quiet bash-doc) || echo "test_all.sh: no bash-doc; its PDFs are not tested"
fi
TEST_MARKS='' bash scripts/test.sh "$@"
.venv/bin/python -m pytest --numprocesses "${TEST_PROCESSES:-3}" --dist loadscope --no-loadscope-reorder \
    --async-scheduling tests/oracle tests/runner tests/faults -m "not full"
bash scripts/test_environments.sh
