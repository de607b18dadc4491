#!/usr/bin/env bash
# Makes .venv in the checkout, with the package and what it needs. Does nothing when that is already there.
# usage: setup_env.sh [dev]             dev: also what tests and checks need
#        setup_env.sh lowest | oracle   another environment, in .cache/environments (test_environments.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:-}
requirements=requirements${name:+-$name}.txt
environment=.venv
case $name in
    '' | dev) ;;
    lowest | oracle) environment=.cache/environments/$name ;;
    *) echo "setup_env.sh: '$name' is no environment; name dev, lowest, oracle, or none" >&2 && exit 2 ;;
esac

# The newest that is supported, wherever it stands on PATH; PYTHON names another.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3.10 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON does not run, or is not Python 3.10 to 3.14; name another, or unset it" >&2
    else
        echo "Python 3.10 to 3.14 is needed, and none was found on PATH; install one, or name it: PYTHON=/path/to/python3" >&2
    fi
    return 1
}

make_environment() {
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # Debian and Ubuntu ship Python without these two, and venv then leaves half an environment behind.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python has no venv module: install it (Debian, Ubuntu: apt install python$version-venv), or name another" \
            "Python: PYTHON=/path/to/python3" >&2
        return 1
    fi
    echo "making $environment with $("$python" --version)"
    "$python" -m venv "$environment"
}

[ -x "$environment"/bin/python ] || make_environment
# Where pip is missing, making the environment was cut short, or another program made it.
if ! "$environment"/bin/python -m pip --version >/dev/null 2>&1 && ! "$environment"/bin/python -m ensurepip >/dev/null; then
    echo "$environment has no pip and cannot get one: remove $environment and run this again" >&2
    exit 1
fi
# One stamp per list: it holds what was installed, so that a changed list installs again.
wanted() { cat requirements.txt requirements-tests.txt "$1" pyproject.toml; }
stamp="$environment/installed-$requirements"
if [ ! -f "$stamp" ] || [ "$(wanted "$requirements")" != "$(cat "$stamp")" ]; then
    echo "installing $requirements into $environment (minutes on the first run)"
    "$environment"/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r "$requirements"
    # torch brings the setuptools that builds this; pip would install another one first.
    "$environment"/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    # pip compiles one of 17,000 modules after the other, for over a minute. Some are templates, and cannot be compiled.
    # These folders have half of them, of which few are ever imported: Python compiles those itself.
    "$environment"/bin/python -m compileall -q -j 0 -x '/(tests|testing|models|networkx|sklearn|mypyc?|setuptools|pip|pygments)/' \
        "$environment"/lib >/dev/null 2>&1 || true
    wanted "$requirements" >"$stamp"
    [ "$name" != dev ] || wanted requirements.txt >"$environment/installed-requirements.txt" # dev has all of these
fi
