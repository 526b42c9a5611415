#!/usr/bin/env bash
# Prints the full path of a Python 3.12, else of a 3.13: first on PATH, then under pyenv. Exits with 1 where none runs.
set -euo pipefail

# Every candidate is run, for a pyenv shim lies on PATH whether or not its version is installed or selected. It names
# the interpreter behind a shim, a link or a virtual environment: that one stays when .venv is removed. The modules are
# those that a home-built Python may lack and our packages import.
describe='
import bz2, ctypes, lzma, os, ssl, sys
if sys.implementation.name == "cpython":
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    print("%d.%d" % sys.version_info[:2], executable)
'

for version in 3.12 3.13; do
    candidates=()
    for name in "python$version" python3 python; do
        while IFS= read -r path; do candidates+=("$path"); done < <(type -aP "$name" || true)
    done
    for root in "${PYENV_ROOT:-}" ~/.pyenv; do
        if [[ -n $root ]]; then candidates+=("$root"/versions/*/bin/"python$version"); fi
    done
    for candidate in "${candidates[@]}"; do
        found=$("$candidate" -I -c "$describe" 2>/dev/null) || continue
        if [[ ${found%% *} == "$version" ]]; then
            echo "${found#* }"
            exit 0
        fi
    done
done
exit 1
