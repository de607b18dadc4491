#!/usr/bin/env bash
#SBATCH --job-name=npu-runner
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=npu-runner-%A_%a.log
#SBATCH --signal=B:TERM@300
# One whole host for each part of the input. Never run on an Ascend host yet.
#   mkdir parts answers
#   split --number=l/4 --numeric-suffixes --suffix-length=3 --additional-suffix=.jsonl requests.jsonl parts/
#   sbatch --array=0-3 scripts/deploy/slurm_array.sh parts answers --model /data/Qwen3-VL --allowed-media-dir /data --data-parallel-size auto
# LAUNCHER is what starts `batch` (run_ascend.sh, found by PATH): in a container 'run_container.sh -v /data:/data IMAGE run_ascend.sh'.
set -euo pipefail

parts=$1 answers=$2
shift 2
read -ra launcher <<<"${LAUNCHER:-run_ascend.sh}"
part=$(printf '%03d' "$SLURM_ARRAY_TASK_ID")

"${launcher[@]}" batch -i "$parts/$part.jsonl" -o "$answers/$part.jsonl" --summary "$answers/$part.summary.json" "$@" &
job=$! signalled=''
trap 'signalled=1; kill -TERM "$job"' TERM # Slurm's, five minutes before the time is up: rows in flight are dropped
status=0
wait "$job" || status=$?
if [ -n "$signalled" ]; then # that wait ended with the signal, not with the job
    status=0
    wait "$job" || status=$?
fi
# 1: ended early, the same command resumes. 2: a wrong option or setting. 3: finished, some rows failed. 4: too many failed.
if [ "$status" -eq 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
