#!/usr/bin/env bash
# Makes FOLDER a virtual environment that holds what `uv pip install` installs for the other arguments. It is built
# beside FOLDER and renamed, so that FOLDER is whole or as it was; it works on where the project is moved or copied to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1
shift

# `make test` and `make quickstart` may be started at the same time; the second one waits.
mkdir -p .uv
exec 9>.uv/lock
flock 9

wanted="$* $(cksum < requirements.lock)"
if [[ $(cat "$folder/.complete" 2>/dev/null) == "$wanted" ]] && "$folder/bin/python" -c "" 2>/dev/null; then
    touch "$folder/.complete"
    exit
fi
bash scripts/uv.sh venv --quiet --no-project --relocatable --clear --python '>=3.12,<3.14' "$folder.new"
# Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), each start would compile all of jax and flax: 3 s.
UV_COMPILE_BYTECODE=1 bash scripts/uv.sh pip install --python "$folder.new/bin/python" "$@"
# Our own modules, from any working directory.
for site_packages in "$folder.new"/lib/python3.*/site-packages; do
    realpath --relative-to="$site_packages" . > "$site_packages/lineargpt.pth"
done
echo "$wanted" > "$folder.new/.complete"
rm -rf "$folder"
mv "$folder.new" "$folder"
if [[ $folder == .venv && $* != *"--extra cuda"* ]] && nvidia-smi -L >/dev/null 2>&1; then
    echo 'There is an NVIDIA GPU here, and this is the CPU build of jax: `make setup CUDA=1` installs the GPU build.'
fi
