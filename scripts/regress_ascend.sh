#!/usr/bin/env bash
# The regression run on an Ascend host, what answers soonest first: each operator beside the CPU, the doctor, a batch job of
# the embedded model in eager and in graph mode, the tests of the npu platform, settings that have several values, and last
# whether compiled graphs may be replayed without waiting for the last replay (docs/ascend.md says why).
# Writes a folder, with a folder for each step and CANN's log of it, and beside it a .tar.gz that you can attach to an issue.
# It holds versions, variables, logs and results, no checkpoint and no images of yours. A step that fails or hangs does not
# keep the next from running; Ctrl-C ends the run with a report of what is known.
# usage: regress_ascend.sh [--out FOLDER] [--rows N] [--operators NAME] [--quick] [--bench] [-- PYTEST ARGUMENTS]
#   --out FOLDER       default: regress-ascend-DATE where you are
#   --rows N           of the batch job, default 64
#   --operators NAME   only operators and layers whose name has this in it
#   --quick            about an hour instead of many. It leaves out: the doctor's generations; jobs of more than 4 rows at once;
#                      measurements at real sizes, in several repeats and of other settings than decode attention and replay.
#                      A tiny model runs once on each side, and its figures mean nothing
#   --bench            also python -m bench.device on this NPU, with vllm-ascend beside it where that is installed; with
#                      --quick at tiny sizes
# Exit status 1: something failed; the last line and report.txt say what.
set -uo pipefail

case ${1:-} in -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac
out=$PWD/regress-ascend-$(date +%Y%m%d-%H%M%S)
rows=64
quick=
bench=
operators=()
tests=(-m npu tests/npu)
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2; shift 2 ;;
        --rows) rows=$2; shift 2 ;;
        --operators) operators+=(--only "$2"); shift 2 ;;
        --quick) quick=1; shift ;;
        --bench) bench=1; shift ;;
        --) shift; tests=("$@"); break ;;
        *) echo "regress_ascend.sh: $1 is unknown; see --help" >&2; exit 2 ;;
    esac
done
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
report=$out/report.txt
# As install.sh makes them; in a checkout, the Python of this shell.
python=python3
[ ! -x bin/python ] || python=$PWD/bin/python
tests_python=$python
[ ! -x tests-environment/bin/python ] || tests_python=$PWD/tests-environment/bin/python
[ -z "${PYTHON:-}" ] || python=$PYTHON tests_python=$PYTHON
steps=0
failed=()
running=

# Runs a program for at most so many minutes, with its output and CANN's log in a folder, and notes how it ended.
step() {
    local name=$1 minutes=$2 started=$SECONDS status=0
    shift 2
    steps=$((steps + 1))
    echo "== $name"
    mkdir -p "$out/$name/logs"
    # In the background: bash handles signals at once while it waits for such a program.
    ASCEND_PROCESS_LOG_PATH=$out/$name/logs timeout --kill-after=60 "${minutes}m" \
        scripts/run_ascend.sh --exec "$@" >"$out/$name/output.txt" 2>&1 &
    running=$!
    wait "$running" || status=$?
    running=
    [ "$status" = 0 ] || failed+=("$name")
    printf '%-24s %s (exit status %s, %s s, %s)\n' "$name" "$([ "$status" = 0 ] && echo ok || echo FAILED)" \
        "$status" "$((SECONDS - started))" "$name/output.txt" | tee -a "$report"
}

finish() {
    [ -z "$running" ] || { kill "$running"; wait "$running"; }
    rm -rf "$out/job" "$out/operators.tar.gz"
    {
        echo
        echo "operators and layers that are not right:"
        grep -vE '^right ' "$out/operators/output.txt"
        for mode in eager graph; do
            echo
            echo "summary of the batch job, $mode:"
            cat "$out/$mode/summary.json"
        done
        cat "$out/answers/output.txt"
        echo
        echo "both ways:"
        cat "$out"/{compare,replay}/output.txt | grep -v '^{'
        echo
        [ -z "$bench" ] || grep -E '^(\([a-f]\)|    )' "$out/bench/output.txt"
        echo "failed tests:"
        grep -E '^(FAILED|ERROR)' "$out/tests/output.txt" || echo none
        echo
        cat "$out/doctor/output.txt" "$out/host.txt"
    } >>"$report" 2>&1
    tar -C "$(dirname "$out")" -czf "$out.tar.gz" "$(basename "$out")"
    echo "report: $report, everything: $out.tar.gz"
    echo "${#failed[@]} of $steps steps failed${failed[*]:+: ${failed[*]}}"
}
trap finish EXIT
trap 'failed+=(interrupted); exit 1' INT TERM

{
    echo "npu-runner regression on $(uname -srm), $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "commit $(cat commit 2>/dev/null || git rev-parse HEAD 2>/dev/null || echo unknown)$([ -z "$(git status --porcelain 2>/dev/null)" ] || echo ', changed')"
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
    job=(--max-num-seqs 4 --max-model-len 512)
    replay=(--size tiny --repeats 1)
    compare=(--size tiny --repeats 1 --only decode_attention)
    figures+=(--sizes tiny --graph-mode eager --part decode --repeats 1 --peer)
fi

batch() {
    step "$1" 60 "$python" -m npu_runner batch --platform npu --graph-mode "$2" "${job[@]}" \
        --input "$out/job/requests.jsonl" --output "$out/$1/answers.jsonl" --overwrite \
        --allowed-media-dir "$out/job/pictures" --summary "$out/$1/summary.json"
}

# Nine of ten answers must be right in each mode, and those of both modes the same.
# shellcheck disable=SC2317,SC2329 # a step calls it, by its name
compare_modes() {
    local mode rows right status=0
    for mode in eager graph; do
        "$python" -m npu_runner table "$out/$mode/answers.jsonl" -i "$out/job/requests.jsonl" -o "$out/$mode/answers.csv" ||
            status=1
        read -r rows right < <(awk '/^    "(as_)?expected":/ { printf "%d ", $2 }' "$out/$mode/summary.json")
        echo "$mode: ${right:-0} of ${rows:-0} rows as expected"
        if [ "${rows:-0}" = 0 ] || [ $((10 * right)) -lt $((9 * rows)) ]; then status=1; fi
    done
    diff "$out/eager/answers.csv" "$out/graph/answers.csv" || status=1
    return $status
}
export -f compare_modes
export python out

step operators 30 "$python" -m npu_runner doctor --platform npu --operators "${operators[@]}" --out "$out/operators"
step doctor 60 "$python" -m npu_runner "${doctor[@]}"
step images 10 "$python" scripts/demo_requests.py "$out/job" --num-rows "$rows"
batch eager eager
batch graph reduce-overhead
step answers 10 bash -c compare_modes
step tests 240 "$tests_python" -m pytest --junitxml "$out/tests/tests.xml" "${tests[@]}"
step compare 480 "$python" scripts/compare_ascend.py "${compare[@]}"
[ -z "$bench" ] || step bench 480 "$python" -m bench.device "${figures[@]}"
step replay 480 "$python" scripts/compare_ascend.py --only replay "${replay[@]}"
[ ${#failed[@]} = 0 ]
