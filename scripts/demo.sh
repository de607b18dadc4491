#!/usr/bin/env bash
# Environment if needed, then on the CPU, with embedded models: from a folder of freshly drawn images to a table and a report
# (rows, batch, table), and from a folder of PDFs to Markdown (read).
# usage: demo.sh [images] [embedded model of the images]
#   ENVIRONMENT=folder: one that has all already, in place of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${ENVIRONMENT:-.venv}
[ -n "${ENVIRONMENT:-}" ] || bash scripts/setup_env.sh

out=demo-output
images=${1:-64}
model=${2:-shapes-vl}
rm -rf "$out/pictures" "$out/documents" "$out/read"
mkdir -p "$out"
"$environment"/bin/python scripts/demo_pictures.py "$out" --num-images "$images"
"$environment"/bin/python scripts/demo_documents.py "$out"

run() {
    printf '+'
    printf ' %q' "$@"
    echo
    "$environment/bin/$1" "${@:2}"
}

run npu-runner rows "$out/pictures" --prompt-file "$out/question.txt" --schema "$out/schema.json" --max-tokens 96 \
    --body '{"temperature": 0}' --kind folder -o "$out/rows.jsonl"
status=0
run npu-runner batch --platform cpu --model "$model" -i "$out/rows.jsonl" -o "$out/answers.jsonl" --overwrite \
    --allowed-media-dir "$out/pictures" --report "$out/report.html" --summary "$out/summary.json" || status=$?
run npu-runner table "$out/answers.jsonl" -i "$out/rows.jsonl" -o "$out/table.csv"
read_status=0
run npu-runner read "$out/documents" -o "$out/read" --platform cpu --model shapes-reader || read_status=$?

echo
head -n 4 "$out/table.csv" | cut -d, -f1-6
echo
head -n 14 "$out/read/markdown/station-1.pdf.md"
echo
echo "table:    $out/table.csv"
echo "answers:  $out/answers.jsonl"
echo "summary:  $out/summary.json"
echo "report:   $PWD/$out/report.html (open it in a browser)"
echo "markdown: $out/read/markdown"
exit $((status > read_status ? status : read_status))
