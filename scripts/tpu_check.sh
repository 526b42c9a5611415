#!/usr/bin/env bash
# Builds .venv-tpu/VERSION for the version of jax of requirements.lock, with libtpu, which compiles for a TPU on a machine
# without one, and runs the check in it. The table is in .venv-tpu/VERSION/report.txt. The arguments are those of
# `python -m benchmarks.tpu_check`, such as `steps`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p .venv-tpu
exec 8>.venv-tpu/.lock
flock 8
version=$(sed -nE 's/^jax==([^ ;]+).*/\1/p' requirements.lock)
# Extra tpu of jax has the libtpu that goes with it; the other packages have the versions of the lock.
names='absl-py|flax|jaxlib|jaxtyping|ml-dtypes|msgpack|numpy|opt-einsum|optax|pyyaml|rich|markdown-it-py|mdurl|pygments'
names+='|scipy|treescope|typing-extensions|wadler-lindig|etils|orbax-checkpoint|tyro|docstring-parser|typeguard|orjson'
mapfile -t packages < <(sed -nE "s/^($names)==([^ ;]+).*/\1==\2/p" requirements.lock)
bash scripts/environment.sh ".venv-tpu/$version" --quiet "jax[tpu]==$version" "${packages[@]}" 8>&-
".venv-tpu/$version/bin/python" -m benchmarks.tpu_check "$@" > ".venv-tpu/$version/report.txt" || failed=$?
cat ".venv-tpu/$version/report.txt"
exit "${failed:-0}"
