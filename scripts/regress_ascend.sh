#!/usr/bin/env bash
# The regression suite on real hardware: what this host is, the doctor, whether compiled graphs may be replayed without
# waiting for the last replay (the first measurement: docs/ascend.md says why), the tests of the npu platform, a small
# batch job, and what else can be done in two ways, measured both ways (scripts/compare_ascend.py).
# Writes a folder and, beside it, a .tar.gz that you can attach to an issue. It holds versions, variables and results, no
# checkpoint and no images of yours.
# usage: regress_ascend.sh [--out FOLDER] [--rows N] [--quick] [--bench] [-- PYTEST ARGUMENTS]
#   --quick   minutes instead of hours: the doctor does not generate, the job runs eagerly, two sides, twice, of a tiny model
#   --bench   also python -m bench.device on this NPU, with vllm-ascend beside it where that is installed; with --quick
#             at tiny sizes, whose figures mean nothing
# Exit status 1: something failed; report.txt says what.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

out=regress-ascend-$(date +%Y%m%d-%H%M%S)
rows=64
quick=
bench=
tests=(-m npu tests/npu)
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2; shift 2 ;;
        --rows) rows=$2; shift 2 ;;
        --quick) quick=1; shift ;;
        --bench) bench=1; shift ;;
        --) shift; tests=("$@"); break ;;
        *) echo "regress_ascend.sh: $1 is unknown; see the head of this file" >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
report=$out/report.txt
python=${PYTHON:-python3}
steps=0
failures=0

# Runs a program with its output in a file, and notes in the report how it ended.
step() {
    local name=$1 file=$2 started=$SECONDS status=0
    shift 2
    steps=$((steps + 1))
    echo "== $name"
    scripts/run_ascend.sh --exec "$@" >"$out/$file" 2>&1 || status=$?
    [ "$status" = 0 ] || failures=$((failures + 1))
    printf '%-24s %s (exit status %s, %s s, %s)\n' "$name" "$([ "$status" = 0 ] && echo ok || echo FAILED)" \
        "$status" "$((SECONDS - started))" "$file" | tee -a "$report"
}

{
    echo "npu-runner regression on $(uname -srm), $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown)$([ -z "$(git status --porcelain 2>/dev/null)" ] || echo ', changed')"
    echo
} >"$report"

{
    echo "# npu-smi info"
    npu-smi info 2>&1
    echo "# driver"
    cat /usr/local/Ascend/driver/version.info 2>&1
    echo "# python"
    "$python" --version
    "$python" -m pip list 2>/dev/null | grep -iE '^(torch|torch[-_]npu|numpy|transformers|safetensors|tokenizers|pillow|triton) '
    echo "# environment"
    scripts/run_ascend.sh --exec env | grep -E '^(ASCEND|HCCL|PYTORCH_NPU|PYTORCH_ALLOC|TASK_QUEUE|CPU_AFFINITY|OMP|LD_LIBRARY|ATB)' | sort
} >"$out/host.txt" 2>&1

doctor=(doctor --platform npu)
job=(--max-num-seqs 16)
figures=(--platform npu)
replay=(--repeats 10)
compare=(--num-devices "$(find /dev -maxdepth 1 -name 'davinci[0-9]*' | wc -l)" --skip replay)
if [ -n "$quick" ]; then
    doctor+=(--skip-generation)
    job+=(--enforce-eager)
    replay=(--size tiny --repeats 1)
    compare=(--size tiny --repeats 1 --only decode_attention)
    figures+=(--sizes tiny --graph-mode eager --part decode --repeats 1 --no-peer)
fi
step doctor doctor.txt "$python" -m npu_runner "${doctor[@]}"
step replay replay.txt "$python" scripts/compare_ascend.py --only replay "${replay[@]}"
step tests tests.txt "$python" -m pytest --junitxml "$out/tests.xml" "${tests[@]}"
step images images.txt "$python" scripts/demo_requests.py "$out/job" --num-rows "$rows"
step batch batch.txt "$python" -m npu_runner batch --platform npu "${job[@]}" \
    --input "$out/job/requests.jsonl" --output "$out/answers.jsonl" --overwrite \
    --allowed-media-dir "$out/job/pictures" --summary "$out/summary.json"
rm -rf "$out/job"
step compare compare.txt "$python" scripts/compare_ascend.py "${compare[@]}"
[ -z "$bench" ] || step bench bench.txt "$python" -m bench.device "${figures[@]}"

{
    echo
    echo "summary of the batch job:"
    cat "$out/summary.json" 2>&1
    echo
    echo "both ways:"
    cat "$out/replay.txt" "$out/compare.txt" | grep -v '^{'
    echo
    if [ -n "$bench" ]; then
        echo "figures (bench.txt has them as JSON, too):"
        grep -E '^(\([a-f]\)|    )' "$out/bench.txt"
        echo
    fi
    echo "failed tests:"
    grep -E '^(FAILED|ERROR)' "$out/tests.txt" || echo none
    echo
    cat "$out/doctor.txt"
    echo
    cat "$out/host.txt"
} >>"$report"
tar -C "$(dirname "$out")" -czf "$out.tar.gz" "$(basename "$out")"
echo "$failures of $steps steps failed; report: $report, everything: $out.tar.gz"
[ "$failures" = 0 ]
