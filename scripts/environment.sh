#!/usr/bin/env bash
# Creates the virtual environment FOLDER; `uv pip install` gets the other arguments. It is built beside FOLDER and
# renamed, so that FOLDER is complete or unchanged. It still works after the project is moved or copied.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1
shift

# `make test` and `make quickstart` may run at the same time; the second one waits.
mkdir -p .uv
exec 9>.uv/lock
flock 9

wanted="$* $(cksum < requirements.lock)"
if [[ $(cat "$folder/.complete" 2>/dev/null) == "$wanted" ]] && "$folder/bin/python" -c "" 2>/dev/null; then
    touch "$folder/.complete"
    exit
fi
bash scripts/uv.sh venv --quiet --no-project --relocatable --clear --python '>=3.12,<3.14' "$folder.new"
# With PYTHONDONTWRITEBYTECODE each start would compile all of jax and flax, for 3 s.
UV_COMPILE_BYTECODE=1 bash scripts/uv.sh pip install --python "$folder.new/bin/python" "$@"
# Our own modules, from any working directory.
for site_packages in "$folder.new"/lib/python3.*/site-packages; do
    realpath --relative-to="$site_packages" . > "$site_packages/lineargpt.pth"
done
echo "$wanted" > "$folder.new/.complete"
rm -rf "$folder"
mv "$folder.new" "$folder"
if [[ $folder == .venv && $* != *"--extra cuda"* ]] && nvidia-smi -L >/dev/null 2>&1; then
    echo 'This machine has an NVIDIA GPU, but this is the CPU build of jax: `make setup CUDA=1` installs the GPU build.'
fi
