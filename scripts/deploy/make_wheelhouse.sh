#!/usr/bin/env bash
# Makes a folder with all that a host without internet lacks: npu-runner and its dependencies as wheels, the launchers, the
# files of this folder, and the regression run with its tests and their wheels. torch and torch_npu are not in it: the image
# brings that pair. Run it where there is internet.
# usage: make_wheelhouse.sh [--python 3.12] [--machine aarch64] FOLDER [REQUIREMENT...]
#   --python, --machine   of the Ascend host (python3 --version, uname -m); the defaults are those of vllm-ascend's images on ARM
#   REQUIREMENT           more packages beside those for tables and PDFs, which are in it: as 'av>=17.1' for videos, 'pillow-heif>=1.0' for HEIC, 'ray[data]>=2.40'
set -euo pipefail

fail() {
    printf 'make_wheelhouse.sh: %s\n' "$*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=3.12 machine=aarch64
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        --python | --machine) [ $# -gt 1 ] || fail "$1: its value is missing" ;;&
        --python) python=$2 ;;
        --machine) machine=$2 ;;
        -*) fail "unknown option '$1'" ;;
        *) break ;;
    esac
    shift 2
done
[ $# -gt 0 ] || fail "no folder was named"
folder=$1
shift
[ ! -e "$folder" ] || fail "$folder exists already; remove it, or name another folder"
mkdir -p "$folder"

python3 -m pip wheel --no-deps --wheel-dir "$folder" "$root"
grep -v '^torch' "$root/requirements-npu.txt" >"$folder/requirements.txt"
# Tables in Parquet are what the first page shows, and a host without internet can add neither pyarrow nor a reader of PDFs.
sed -n 's/^\(tables\|pdf\) = \["\(.*\)"\]$/\2/p' "$root/pyproject.toml" | sed 's/", "/\n/g' >>"$folder/requirements.txt"
[ $# -eq 0 ] || printf '%s\n' "$@" >>"$folder/requirements.txt"
# What regress_ascend.sh runs: install.sh lays it around the environment, as it lies in a checkout.
mkdir "$folder/regression"
tar -C "$root" --exclude=__pycache__ --exclude=scripts/deploy -cf - pyproject.toml scripts bench tests | tar -C "$folder/regression" -xf -
git -C "$root" describe --always --dirty=+ --exclude='*' >"$folder/regression/commit" 2>/dev/null || rm "$folder/regression/commit"
# The versions of CI. pip would read their markers for the Python that it runs in.
others='<'
[ "$python" != 3.10 ] || others='>='
cat "$root"/requirements-{tests,dev}.txt | grep -E '^(av|hypothesis|pytest|pytest-timeout|transformers)==' |
    grep -v "python_version $others" | cut -d ';' -f 1 >"$folder/regression/requirements.txt"
# pip knows no "this glibc or older" of another machine. 2.34 is that of openEuler 22.03, the oldest host in the documents.
platforms=()
for minor in {34..17}; do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
platforms+=(--platform "manylinux2014_$machine")
python3 -m pip download --dest "$folder" --only-binary :all: --python-version "$python" "${platforms[@]}" \
    -r "$folder/requirements.txt" -r "$folder/regression/requirements.txt"
! compgen -G "$folder/torch[-_]*" >/dev/null || fail "a requirement brought torch, which the image has: $(cd "$folder" && echo torch[-_]*)"
cp "$root/scripts/run_ascend.sh" "$root/scripts/ray_ascend.sh" "$root"/scripts/deploy/* "$folder"
