#!/usr/bin/env bash
# Starts npu-runner on an Ascend host: CANN's environment first, then settings that suit this job, each with its reason.
# What you have set yourself stays as it is.
# usage: run_ascend.sh COMMAND [OPTIONS]      the same as `npu-runner COMMAND [OPTIONS]`
#        run_ascend.sh batch ... --data-parallel-size auto     a job over all devices of this host
#        run_ascend.sh --dry-run [...]        show what would be sourced, set and started
#        run_ascend.sh --exec PROGRAM [...]   another program in the same environment
set -euo pipefail

case ${1:-} in
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        printf '\n'
        ;;
esac
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

# Only what is read before Python can say anything: the rest depends on the chip and the number of ranks, and npu-runner
# sets it itself (npu_runner/platforms/npu/host_settings.py), however it is started.
# Threads that wait must not spin on the cores that preprocessing needs.
default OMP_WAIT_POLICY PASSIVE
# Errors only: at lower levels CANN writes gigabytes in a night.
default ASCEND_GLOBAL_LOG_LEVEL 3

if [ "${1:-}" = --exec ]; then
    shift
    command=("$@")
elif command -v npu-runner >/dev/null; then
    command=(npu-runner "$@")
else
    # Not installed: from this script's own checkout, and not from whatever folder this is run in, as -m would.
    command=(python3 -c 'import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
from npu_runner.cli.main import main
sys.exit(main())' "$(cd "$(dirname "$0")/.." && pwd)" "$@")
fi
say "${command[*]}"
[ -z "$is_dry" ] || exit 0
exec "${command[@]}"
