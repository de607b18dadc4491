#!/usr/bin/env bash
# Starts a Ray cluster over Ascend hosts, and stops it: the head on the first host, workers on the others, through ssh. Each
# host gives its devices as the resource NPU, and Ray runs in the environment that run_ascend.sh makes there.
# usage: ray_ascend.sh start --hosts "HOST HOST ..." [OPTIONS]
#        ray_ascend.sh stop --hosts "HOST HOST ..." [OPTIONS]      ends all of Ray on these hosts, other people's too
#   --hosts-file FILE   the hosts, one a line, instead of --hosts; # begins a comment
#   --port PORT         of the head (6379)
#   --npus N            devices of each host, instead of the /dev/davinci* that it has
#   --root DIR          folder of this project on every host (the one that this script lies in)
#   --before COMMAND    what every host runs first, as 'source /opt/venv/bin/activate'
#   --container NAME    on every host all of this runs in its running container NAME (`docker exec`)
#   --dry-run           show what would be run, and where; nothing is run
# Nothing is started before every host was reached and was found to have the same npu-runner, the same Ray and devices.
# ssh must come in without a password. RAY_AUTH_MODE is handed on where it is set; a token lies in ~/.ray on every host.
set -euo pipefail

fail() {
    printf 'ray_ascend.sh: %s\n' "$*" >&2
    exit 2
}

action=${1:-}
if [ "$action" = --help ] || [ "$action" = -h ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
[ "$action" = start ] || [ "$action" = stop ] || fail "the first argument is start or stop, not '$action'"
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hosts=() port=6379 npus='' before='' container='' is_dry=''
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) is_dry=1; shift; continue ;;
        --hosts | --hosts-file | --port | --npus | --root | --before | --container) [ $# -gt 1 ] || fail "$1: its value is missing" ;;
        *) fail "unknown option '$1'" ;;
    esac
    case $1 in
        --hosts) read -ra hosts <<<"${2//,/ }" ;;
        --hosts-file)
            [ -r "$2" ] || fail "--hosts-file: $2 cannot be read"
            mapfile -t hosts < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$2")
            ;;
        --port) port=$2 ;;
        --npus) npus=$2 ;;
        --root) root=$2 ;;
        --before) before=$2 ;;
        --container) container=$2 ;;
    esac
    shift 2
done
[ ${#hosts[@]} -gt 0 ] || fail "no host was named: --hosts 'HOST HOST ...' or --hosts-file FILE"
[[ $port =~ ^[0-9]+$ ]] || fail "--port: '$port' is no number"
[[ $npus =~ ^([1-9][0-9]*)?$ ]] || fail "--npus: '$npus' is no positive number"
twice=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d | tr '\n' ' ')
[ -z "$twice" ] || fail "named twice: $twice"
for host in "${hosts[@]}"; do
    [[ $host != -* ]] || fail "'$host' is no host"
done

# What a host runs, as one word for the shell there: with `--before` first, in the folder of the project.
remote() {
    printf '%scd %q && %s' "${before:+$before && }" "$root" "$1"
}
# The same in the environment of run_ascend.sh.
in_environment() {
    remote "${RAY_AUTH_MODE:+RAY_AUTH_MODE=$RAY_AUTH_MODE }scripts/run_ascend.sh --exec $1"
}
# The same words for the shell of the host, or of its container.
placed() {
    if [ -n "$container" ]; then
        printf 'docker exec %q bash -c %q' "$container" "$1"
    else
        printf '%s' "$1"
    fi
}
# Run it on a host; what it prints is the answer.
ask() {
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$1" "$(placed "$2")" </dev/null
}
# Run it on a host, or show it.
run() {
    if [ -n "$is_dry" ]; then
        printf '%s: %s\n' "$1" "$(placed "$2")"
    else
        ask "$1" "$2" >&2
    fi
}

stop() {
    local status=0 index
    for ((index = ${#hosts[@]} - 1; index >= 0; index--)); do # workers first: they would look for their head
        run "${hosts[index]}" "$(in_environment "ray stop")" || {
            status=1
            printf 'ray_ascend.sh: %s: Ray was not stopped\n' "${hosts[index]}" >&2
        }
    done
    return $status
}

versions_of='python3 -c "import npu_runner, ray; print(npu_runner.__version__, ray.__version__)"'
# Only the devices: davinci_manager is none.
count_of='find /dev -maxdepth 1 -name "davinci[0-9]*" | wc -l'
address_of='hostname -I | cut -d " " -f 1'

# Sets `counts`, one a host, and `address`, or ends with everything that is wrong.
check() {
    local host first='' versions wrong=0 count
    for host in "${hosts[@]}"; do
        if ! ask "$host" true; then
            printf 'ray_ascend.sh: %s: cannot be reached by ssh without a password%s\n' "$host" \
                "${container:+, or has no running container $container}" >&2
            wrong=1
            continue
        fi
        if ! versions=$(ask "$host" "$(in_environment "$versions_of")"); then
            printf 'ray_ascend.sh: %s: %s does not have npu-runner and Ray (--root, --before; pip install "ray[data]>=2.40")\n' \
                "$host" "$root" >&2
            wrong=1
            continue
        fi
        first=${first:-$versions}
        if [ "$versions" != "$first" ]; then
            printf 'ray_ascend.sh: %s: has npu-runner and Ray %s, %s has %s; install the same\n' \
                "$host" "$versions" "${hosts[0]}" "$first" >&2
            wrong=1
        fi
        count=${npus:-$(ask "$host" "$count_of")}
        if [ "$count" -lt 1 ]; then
            printf 'ray_ascend.sh: %s: has no /dev/davinci*, so no NPU; --npus says how many there are\n' "$host" >&2
            wrong=1
        fi
        counts+=("$count")
    done
    [ $wrong -eq 0 ] || fail "nothing was started"
    address=$(ask "${hosts[0]}" "$address_of"):$port
}

show_checks() {
    local host
    for host in "${hosts[@]}"; do
        run "$host" "$(in_environment "$versions_of")"
        [ -n "$npus" ] || run "$host" "$count_of"
        counts+=("${npus:-<its /dev/davinci*>}")
    done
    run "${hosts[0]}" "$address_of"
    address="<its address>:$port"
}

start() {
    local index where
    for index in "${!hosts[@]}"; do
        where="--address '$address'"
        [ "$index" -gt 0 ] || where="--head --node-ip-address '${address%:*}' --port $port"
        if ! run "${hosts[index]}" "$(in_environment "ray start $where --disable-usage-stats --resources '{\"NPU\": ${counts[index]}}'")"; then
            printf 'ray_ascend.sh: %s: Ray did not start there; what was started is stopped\n' "${hosts[index]}" >&2
            hosts=("${hosts[@]:0:index+1}")
            stop || true
            exit 1
        fi
    done
    printf 'npu-runner batch ... --ray %s --data-parallel-size auto\n' "$address"
}

counts=() address=''
if [ "$action" = stop ]; then
    stop
elif [ -n "$is_dry" ]; then
    show_checks
    start
else
    check
    start
fi
