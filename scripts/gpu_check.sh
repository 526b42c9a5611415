#!/usr/bin/env bash
# Builds .venv-gpu/VERSION for the oldest supported version of jax and that of requirements.lock, with the packages that
# compile for an NVIDIA GPU on a machine without one, and runs the check in both. The tables are in
# .venv-gpu/VERSION/report.txt and report-others.txt. The arguments are those of `python -m benchmarks.gpu_check`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .venv-gpu
exec 8>.venv-gpu/.lock
flock 8

# NVIDIA's assembler with its inputs, and cuDNN, whose plans for attention are compiled too. They are pinned, because
# another assembler may spill where this one does not. Nothing runs on a GPU, so no other libraries are needed.
packages=(nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 nvidia-cudnn-cu13==9.28.0.42)
# The dependencies of kernels, models, compilation and benchmarks, at the versions of the lock.
names='absl-py|flax|jaxtyping|ml-dtypes|msgpack|numpy|opt-einsum|optax|pyyaml|rich|markdown-it-py|mdurl|pygments'
names+='|scipy|treescope|typing-extensions|wadler-lindig|etils|orbax-checkpoint'
# To read a recipe, for `benchmarks.estimate`.
names+='|tyro|docstring-parser|typeguard|orjson'
locked() { sed -nE "s/^($1)==([^ ;]+).*/\1==\2/p" requirements.lock; }
mapfile -t -O "${#packages[@]}" packages < <(locked "$names")
newest=$(locked jax)

# Background jobs of a shell ignore Ctrl-C.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
versions=(0.11.2 "${newest#jax==}")
reports=()
start() { # VERSION REPORT ARGUMENTS, in the background
    local version=$1 report=.venv-gpu/$1/$2
    reports+=("$report")
    ".venv-gpu/$version/bin/python" -m benchmarks.gpu_check "${@:3}" > "$report" &
}
# In parallel, because much of a compilation uses one core, and beside the next download.
for version in "${versions[@]}"; do
    bash scripts/environment.sh ".venv-gpu/$version" --quiet --no-deps "${packages[@]}" \
        "jax==$version" "jaxlib==$version" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" 8>&-
    start "$version" report.txt --ours "$@"
done
# With the older version only what has a kernel of ours: the rest is XLA's alone.
start "${versions[1]}" report-others.txt --others "$@"
failed=0
for job in $(jobs -p); do wait "$job" || failed=$?; done
# A report's last line is its verdict: print all verdicts at the end.
head -qn -1 "${reports[@]}"
tail -qn 1 "${reports[@]}"
exit "$failed"
