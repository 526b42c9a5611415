# Sourced in the project's folder by what builds a virtual environment: sets `uv` and the package index, and has
# `make_environment FOLDER`, which builds an empty one.

uv=$(bash scripts/find_uv.sh)
# Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each start would compile all of jax and flax: 3 s.
export UV_COMPILE_BYTECODE=1
# uv does not read pip's settings, and behind a mirror the address of the index often stands only there.
if [[ -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
    index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
    if [[ -n $index ]]; then export UV_DEFAULT_INDEX=$index; fi
fi

make_environment() {
    rm -rf "$1"
    local python
    if python=$(bash scripts/find_python.sh); then
        "$uv" venv --quiet --no-project --python "$python" "$1"
    else
        echo "No Python 3.12 or 3.13 on PATH or under pyenv: uv downloads 3.12" >&2
        if ! "$uv" venv --quiet --no-project --managed-python --python 3.12 "$1"; then
            echo "uv could not download it: install Python 3.12 or 3.13, then run \`make setup\` again." >&2
            exit 1
        fi
    fi
}
