#!/usr/bin/env bash
# Builds .venv from requirements.lock; `make` calls it. Its argument: 1, with the GPU build of jax; 0, without it;
# none, as .venv was before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# `make test` and `make quickstart` may be started at the same time; the second one waits.
mkdir -p .uv
if command -v flock >/dev/null; then
    exec 9>.uv/setup.lock
    flock 9
fi

# The stamp is written last: what .venv holds, and for which folder, as `activate` names it. Without one .venv is
# half-built or not ours.
stamp=.venv/.complete
cuda=0 lock="" folder=""
if [[ -f $stamp ]]; then read -r cuda lock folder < "$stamp"; fi
wanted_cuda=${1:-$cuda}
wanted_lock=$(cksum < requirements.lock | tr ' ' -)

whole=no
if [[ $folder == "$PWD" ]] && .venv/bin/python -c "" 2>/dev/null; then whole=yes; fi
if [[ $whole == yes && $cuda == "$wanted_cuda" && $lock == "$wanted_lock" ]]; then
    touch "$stamp"
    exit 0
fi

source scripts/environment.sh
sync() { "$uv" pip sync --python .venv/bin/python --require-hashes "$@" requirements.lock; }

if [[ $whole == yes ]]; then
    sync --quiet --dry-run  # without a network this ends here, and .venv stays whole
    rm "$stamp"
else
    make_environment .venv
fi

sync
if [[ $wanted_cuda == 1 ]]; then
    "$uv" pip install --python .venv/bin/python --constraint requirements.lock --requirement pyproject.toml --extra cuda
fi
# Our own modules, from any working directory.
for site_packages in .venv/lib/python3.*/site-packages; do
    echo "../../../.." > "$site_packages/lineargpt.pth"
done
echo "$wanted_cuda $wanted_lock $PWD" > "$stamp"

if [[ $wanted_cuda == 0 ]] && { nvidia-smi -L >/dev/null 2>&1 || [[ -e /dev/nvidia0 ]]; }; then
    echo "There is an NVIDIA GPU here, and this is the CPU build of jax: \`make setup CUDA=1\` installs the GPU build."
fi
