#!/usr/bin/env bash
# Prints the path of a uv that runs; where there is none, installs one into .uv/ of the project, from the package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runs() { [[ $("$1" --version 2>/dev/null) == "uv "* ]]; }

while IFS= read -r uv; do
    if runs "$uv"; then
        echo "$uv"
        exit 0
    fi
done < <(type -aP uv || true; echo ~/.local/bin/uv; echo "$PWD/.uv/bin/uv")

# pip's own settings may say to install for the user, or only into virtual environments: neither goes with --target.
install() {
    PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$1" -m pip install --quiet --upgrade --target .uv uv >&2 && runs .uv/bin/uv
}

echo "No uv found: installing it into .uv/" >&2
for python in "$(bash scripts/find_python.sh || true)" python3 python /usr/bin/python3; do
    if ! "$python" -c "" 2>/dev/null; then continue; fi
    if "$python" -m pip --version >/dev/null 2>&1; then
        if install "$python"; then echo "$PWD/.uv/bin/uv"; exit 0; fi
    elif "$python" -m venv .uv/pip >/dev/null 2>&1; then
        if install .uv/pip/bin/python; then echo "$PWD/.uv/bin/uv"; exit 0; fi
    fi
done
echo "uv could not be installed: it takes a Python with pip or venv (Debian and Ubuntu: python3-venv) and a way to" \
    "the package index; or install uv yourself, then run \`make setup\` again." >&2
exit 1
