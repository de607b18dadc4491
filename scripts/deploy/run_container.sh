#!/usr/bin/env bash
# `docker run` with what a container needs on an Ascend host: its devices, the driver, shared memory, the host's network.
# Never run on an Ascend host yet. Devices and mounts are those of the vendor's documents.
# usage: run_container.sh [OPTIONS OF docker run] IMAGE [COMMAND...]
#   NPU_DEVICES="0 1"            these devices instead of all /dev/davinci*
#   CONTAINER_ENGINE=podman      instead of docker
set -euo pipefail

fail() {
    printf 'run_container.sh: %s\n' "$*" >&2
    exit 2
}

# A single -h asks for help; with a value behind it, it is docker's --hostname.
[ "$*" != -h ] || set -- --help
case ${1:-} in
    --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    '') fail "no image was named" ;;
esac
if [ -n "${NPU_DEVICES:-}" ]; then
    read -ra numbers <<<"${NPU_DEVICES//,/ }"
    nodes=("${numbers[@]/#//dev/davinci}")
else
    nodes=(/dev/davinci[0-9]*)
    [ -e "${nodes[0]}" ] || fail "there is no /dev/davinci*: no NPU, or its driver is not loaded (npu-smi info)"
fi
nodes+=(/dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc)
# Of the driver, which belongs to the host. Each is mounted to its own path.
mounts=(
    /usr/local/dcmi
    /usr/local/bin/npu-smi
    /usr/local/Ascend/driver/lib64
    /usr/local/Ascend/driver/version.info
    /etc/ascend_install.info
)
options=()
for node in "${nodes[@]}"; do options+=(--device "$node"); done
for path in "${mounts[@]}"; do options+=(--volume "$path:$path"); done
exec "${CONTAINER_ENGINE:-docker}" run --rm --network host --shm-size 16g "${options[@]}" "$@"
