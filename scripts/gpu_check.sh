#!/usr/bin/env bash
# Builds .venv-gpu/VERSION for two versions of jax, the oldest that has to work and that of requirements.lock, each with
# what compiling for an NVIDIA GPU takes on a machine without one, and runs the check in both. The tables are kept as
# .venv-gpu/VERSION/report.txt. Its arguments are those of `python -m benchmarks.gpu_check`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p .venv-gpu .uv
if command -v flock >/dev/null; then
    exec 9>.venv-gpu/.lock
    flock 9
fi

# NVIDIA's assembler with what it reads, and cuDNN, whose plans for attention are compiled too. Pinned, for another
# assembler may spill where this one does not. Nothing is run on a GPU, so its other libraries stay away.
nvidia=(nvidia-cuda-nvcc==13.5.37 nvidia-nvvm==13.5.37 nvidia-cudnn-cu13==9.28.0.42)
# What kernels, models and benchmarks import, and what those import, at the versions of the lock.
names='absl-py|flax|jaxtyping|ml-dtypes|msgpack|numpy|opt-einsum|optax|pyyaml|rich|markdown-it-py|mdurl|pygments'
names+='|scipy|treescope|typing-extensions|wadler-lindig|etils|orbax-checkpoint'
locked() { sed -nE "s/^($1)==([^ ;]+).*/\1==\2/p" requirements.lock; }
newest=$(locked jax)
newest=${newest#jax==}

build() {
    local version=$1 folder=.venv-gpu/$1
    local packages=("jax==$version" "jaxlib==$version" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version")
    local line
    packages+=("${nvidia[@]}")
    while IFS= read -r line; do packages+=("$line"); done < <(locked "$names")
    # The stamp is written last, and says what the environment holds and where.
    local wanted="${packages[*]} $PWD"
    if [[ -f $folder/.complete && $(< "$folder/.complete") == "$wanted" ]] && "$folder/bin/python" -c "" 2>/dev/null
    then
        return
    fi
    if [[ -z ${uv:-} ]]; then source scripts/environment.sh; fi
    echo "Building $folder" >&2
    make_environment "$folder"
    "$uv" pip install --quiet --no-deps --python "$folder/bin/python" "${packages[@]}"
    for site_packages in "$folder"/lib/python3.*/site-packages; do
        echo "../../../../.." > "$site_packages/lineargpt.pth"
    done
    echo "$wanted" > "$folder/.complete"
}

versions=(0.11.2 "$newest")
for version in "${versions[@]}"; do build "$version"; done
# Side by side, for much of a compilation keeps one core busy.
running=()
stop() { kill "${running[@]}" 2>/dev/null || true; }
trap stop EXIT
trap 'echo "gpu-check: interrupted; the environments in .venv-gpu stay" >&2; exit 130' INT
for version in "${versions[@]}"; do
    ".venv-gpu/$version/bin/python" -m benchmarks.gpu_check "$@" > ".venv-gpu/$version/report.txt" &
    running+=($!)
done
# A report's last line is its verdict: those stand together, at the end.
failed=0
verdicts=()
for i in "${!versions[@]}"; do
    report=.venv-gpu/${versions[i]}/report.txt
    wait "${running[i]}" || failed=$?
    verdict=$(tail -n 1 "$report")
    if [[ $verdict == "jax ${versions[i]}: "* ]]; then
        sed '$d' "$report"
    else
        cat "$report"
        verdict="jax ${versions[i]}: ended without a verdict"
    fi
    verdicts+=("$verdict")
done
printf '%s\n' "${verdicts[@]}"
exit "$failed"
