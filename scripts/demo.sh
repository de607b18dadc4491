#!/usr/bin/env bash
# Environment if needed, then the batch job on freshly drawn images with the embedded model, on the CPU.
# usage: demo.sh [rows] [embedded model]
#   ENVIRONMENT=folder: one that has all already, in place of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${ENVIRONMENT:-.venv}
[ -n "${ENVIRONMENT:-}" ] || bash scripts/setup_env.sh

out=demo-output
rows=${1:-64}
model=${2:-shapes-vl}
mkdir -p "$out"
"$environment"/bin/python scripts/demo_requests.py "$out" --num-rows "$rows"

status=0
"$environment"/bin/npu-runner batch --platform cpu --model "$model" \
    --input "$out/requests.jsonl" --output "$out/answers.jsonl" --overwrite \
    --allowed-media-dir "$out/pictures" \
    --report "$out/report.html" --summary "$out/summary.json" || status=$?

echo
echo "answers:  $out/answers.jsonl"
echo "summary:  $out/summary.json"
echo "report:   $PWD/$out/report.html (open it in a browser)"
exit "$status"
