#!/usr/bin/env bash
# Installs npu-runner from the folder that it lies in (make_wheelhouse.sh makes it), without internet. Into an environment of
# its own, which sees the image's packages: torch, torch_npu and all else that fits are used, and nothing in the image changes.
# Beside it are regress_ascend.sh and the tests that it runs, whose packages have an environment of their own.
# usage: install.sh [ENVIRONMENT]      /opt/npu-runner
#   PYTHON=python3.12 install.sh       another Python of the image
set -euo pipefail

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 2
}

case ${1:-} in -*) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${1:-/opt/npu-runner}
[ ! -e "$environment" ] || fail "$environment exists already; remove it, or name another folder"
# Half an environment is in the way of the next try.
trap 'status=$?; [ "$status" -eq 0 ] || rm -rf "$environment"' EXIT

export PIP_DISABLE_PIP_VERSION_CHECK=1 # `pip list` looks for a newer pip, on the internet
"${PYTHON:-python3}" -m venv --system-site-packages --without-pip "$environment"
python=$environment/bin/python
"$python" -m pip --version >/dev/null || fail "${PYTHON:-python3} has no pip"
# Not `pip freeze`: it writes what came from a wheel file as `torch @ file://...`, which is no constraint.
"$python" -m pip list --format=freeze | grep -E '^torch([-_]npu)?==' >"$environment/pair.txt" || true
[ "$(wc -l <"$environment/pair.txt")" -eq 2 ] ||
    fail "this image has no pair of torch and torch_npu (found: $(tr '\n' ' ' <"$environment/pair.txt")); take one that has" \
        "(docs/running-on-ascend.md)"
"$python" -m pip install --no-index --find-links "$here" --constraint "$environment/pair.txt" -r "$here/requirements.txt" \
    npu-runner
environment=$(cd "$environment" && pwd)
cp -R "$here/regression/." "$environment"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ln -s "$packages/npu_runner" "$environment/npu_runner"
# A newer transformers is for the tests alone: jobs, and vLLM beside them, keep the image's.
tests=$environment/tests-environment
"$python" -m venv --system-site-packages --without-pip "$tests"
echo "$packages" >"$("$tests/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/npu-runner.pth"
"$tests/bin/python" -m pip install --no-index --find-links "$here" --constraint "$environment/pair.txt" \
    -r "$environment/requirements.txt" || {
    printf 'install.sh: the packages of the tests cannot be installed here; jobs run without them\n' >&2
    rm -rf "$tests"
}
# The image's own `ray` starts the image's Python, which does not see this environment.
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ray") is None)' &&
    [ ! -e "$environment/bin/ray" ]; then
    printf '#!%s\nfrom ray.scripts.scripts import main\n\nmain()\n' "$environment/bin/python" >"$environment/bin/ray"
    chmod +x "$environment/bin/ray"
fi
