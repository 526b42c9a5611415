#!/usr/bin/env bash
# Builds .venv-gpu/VERSION for two versions of jax, the oldest that has to work and that of requirements.lock, each with
# what compiling for an NVIDIA GPU takes on a machine without one, and runs the check in both. The tables are kept as
# .venv-gpu/VERSION/report.txt. Its arguments are those of `python -m benchmarks.gpu_check`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .venv-gpu
exec 8>.venv-gpu/.lock
flock 8

# NVIDIA's assembler with what it reads, and cuDNN, whose plans for attention are compiled too. Pinned, for another
# assembler may spill where this one does not. Nothing is run on a GPU, so its other libraries stay away.
packages=(nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 nvidia-cudnn-cu13==9.28.0.42)
# What kernels, models and benchmarks import, and what those import, at the versions of the lock.
names='absl-py|flax|jaxtyping|ml-dtypes|msgpack|numpy|opt-einsum|optax|pyyaml|rich|markdown-it-py|mdurl|pygments'
names+='|scipy|treescope|typing-extensions|wadler-lindig|etils|orbax-checkpoint'
# What reads a recipe, for `benchmarks.estimate` and `benchmarks.memory`.
names+='|tyro|docstring-parser|typeguard|orjson'
locked() { sed -nE "s/^($1)==([^ ;]+).*/\1==\2/p" requirements.lock; }
mapfile -t -O "${#packages[@]}" packages < <(locked "$names")
newest=$(locked jax)

reports=()
# A shell has what it starts in the background ignore Ctrl-C.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for version in 0.11.2 "${newest#jax==}"; do
    bash scripts/environment.sh ".venv-gpu/$version" --quiet --no-deps "${packages[@]}" \
        "jax==$version" "jaxlib==$version" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" 8>&-
    reports+=(".venv-gpu/$version/report.txt")
done
# Side by side, for much of a compilation keeps one core busy.
for report in "${reports[@]}"; do "${report%/*}/bin/python" -m benchmarks.gpu_check "$@" > "$report" & done
failed=0
for job in $(jobs -p); do wait "$job" || failed=$?; done
# A report's last line is its verdict: those stand together, at the end.
head -qn -1 "${reports[@]}"
tail -qn 1 "${reports[@]}"
exit "$failed"
