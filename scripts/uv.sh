#!/usr/bin/env bash
# Runs uv in the project's folder, with the given arguments; without a working uv, installs one into .uv/ first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# uv does not read pip's settings, which may be the only place with the index of a mirror.
if [[ -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
    index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
    if [[ -n $index ]]; then export UV_DEFAULT_INDEX=$index; fi
fi
pythons=(python3 python /usr/bin/python3)

find_uv() {
    while IFS= read -r uv; do
        if [[ $("$uv" --version 2>/dev/null) == "uv "* ]]; then return; fi
    done < <(type -aP uv || true; echo ~/.local/bin/uv; echo .uv/bin/uv)
    return 1
}

# pip's settings for user installs or required virtual environments are incompatible with --target.
install_uv() {
    export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
    for python in "${pythons[@]}"; do
        if "$python" -m pip install --quiet --upgrade --target .uv uv ||
            { "$python" -m venv .uv && .uv/bin/python -m pip install --quiet uv; }; then return; fi
    done
    return 1
}

if ! find_uv; then
    echo "No uv found: installing it into .uv/" >&2
    if ! { install_uv >&2 && find_uv; }; then
        echo "uv could not be installed: this requires a Python with pip or venv (Debian and Ubuntu: python3-venv) and" \
            "access to the package index; or install uv yourself, then run \`make setup\` again." >&2
        exit 1
    fi
fi
# A pyenv shim fails for versions that are not selected: put the versions themselves first.
pyenv=${PYENV_ROOT:-~/.pyenv}
for folder in "$pyenv"/versions/3.13*/bin "$pyenv"/versions/3.12*/bin; do PATH=$folder:$PATH; done
exec "$uv" "$@"
