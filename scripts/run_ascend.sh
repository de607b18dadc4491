#!/usr/bin/env bash
# Starts npu-runner on an Ascend host: CANN's environment first, then settings that suit this job, each with its reason.
# What you have set yourself stays as it is.
# usage: run_ascend.sh COMMAND [OPTIONS]      the same as `npu-runner COMMAND [OPTIONS]`
#        run_ascend.sh --dry-run [...]        show what would be sourced, set and started
#        run_ascend.sh --exec PROGRAM [...]   another program in the same environment
set -euo pipefail

is_dry=
if [ "${1:-}" = --dry-run ]; then
    is_dry=1
    shift
fi
say() { [ -z "$is_dry" ] || printf '%s\n' "$*"; }

# The scripts of the toolkit use variables that are not set, commands that fail, and look at "$1": here they get none.
source_script() {
    local script=$1
    shift
    say "source $script"
    set +eu
    # shellcheck source=/dev/null
    source "$script"
    set -eu
}

# The first of these files that is there.
source_first() {
    local script
    for script in "$@"; do
        if [ -f "$script" ]; then
            source_script "$script"
            return
        fi
    done
    say "not found: $*"
}

root=/usr/local/Ascend
if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    source_first "$root/ascend-toolkit/set_env.sh" "$root/cann/set_env.sh"
else
    # .../ascend-toolkit/latest up to CANN 8.3, .../cann-8.5.0 since.
    toolkit=${ASCEND_HOME_PATH%/}
    parent=$(dirname "$toolkit")
    root=$parent
    [ "$(basename "$parent")" != ascend-toolkit ] || root=$(dirname "$parent")
    if [ -n "${ASCEND_OPP_PATH:-}" ] && [[ ":${LD_LIBRARY_PATH:-}" == *":$toolkit"/* ]]; then
        say "sourced already: $toolkit"
    else
        source_first "$toolkit/set_env.sh" "$parent/set_env.sh"
    fi
fi
[ -n "${ATB_HOME_PATH:-}" ] || source_first "$root/nnal/atb/set_env.sh"

# Set a variable, unless the user has; an empty one counts as set.
default() {
    local name=$1 value=$2
    if [ -n "${!name+set}" ]; then
        say "$name=${!name} (yours)"
    else
        export "$name=$value"
        say "$name=$value"
    fi
}

# Segments that grow lose less memory to pictures of ever different sizes.
default PYTORCH_NPU_ALLOC_CONF expandable_segments:True
# A thread of its own launches operators. Level 2 is for training and conflicts with captured graphs.
default TASK_QUEUE_ENABLE 1
# Collectives run on the vector cores: shorter for the small ones of a decode step, and they need fewer streams in a
# captured graph. Without effect where a product or a collective does not support it.
default HCCL_OP_EXPANSION_MODE AIV
# Threads of a device stay on their share of the cores, so that launching does not wander between memory nodes.
default CPU_AFFINITY_CONF 1
# Otherwise every rank and every preprocessing worker starts a thread for each of the host's hundreds of cores.
cores=$(getconf _NPROCESSORS_ONLN)
default OMP_NUM_THREADS "$((cores < 8 ? cores : 8))"
# Threads that wait must not spin on the cores that preprocessing needs.
default OMP_WAIT_POLICY PASSIVE
# Ranks read a large checkpoint at different speeds; with the 120 seconds of HCCL the quick ones give up (EI0006).
default HCCL_CONNECT_TIMEOUT 1200
# Errors only: at lower levels CANN writes gigabytes in a night.
default ASCEND_GLOBAL_LOG_LEVEL 3

if [ "${1:-}" = --exec ]; then
    shift
    command=("$@")
elif command -v npu-runner >/dev/null; then
    command=(npu-runner "$@")
else
    command=(python3 -m npu_runner "$@")
fi
say "${command[*]}"
[ -z "$is_dry" ] || exit 0
exec "${command[@]}"
