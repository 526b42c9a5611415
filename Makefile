# The machine needs only `make`, `bash`, some Python and access to the package index.

# Ignores an active virtual environment and uv's settings for Python and versions, but not those for the package index.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH \
	UV_PYTHON UV_SYSTEM_PYTHON UV_BREAK_SYSTEM_PACKAGES UV_RESOLUTION UV_PRERELEASE UV_EXCLUDE_NEWER UV_TORCH_BACKEND

# The environment variable CUDA may be something else, such as a folder: only 0 and 1 count.
ifeq ($(origin CUDA),command line)
ifeq ($(filter 0 1,$(CUDA)),)
$(error CUDA=$(CUDA): expected CUDA=1, the GPU build of jax, or CUDA=0, the CPU build)
endif
endif
cuda := $(filter 0 1,$(CUDA))

python := .venv/bin/python
venv := .venv/.complete
cpu_build := --require-hashes --requirement requirements.lock
cuda_build := --requirement requirements.lock --requirement pyproject.toml --extra cuda

.PHONY: help setup check test-fast test test-thorough lint gpu-check tpu-check quickstart zoo docs lowest lock clean always

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup:  ## build .venv from requirements.lock; with CUDA=1 the GPU build of jax
	@$(MAKE) --no-print-directory $(venv) CUDA=$(or $(cuda),0)
	@echo 'Set up. To use it: . .venv/bin/activate'

# Without CUDA=… the build stays as it was. The file has the arguments of the build.
$(venv): requirements.lock $(if $(cuda),always)
	@if [ '$(cuda)' = 1 ] || { [ -z '$(cuda)' ] && grep -qs -e '--extra cuda' $@; }; then \
		bash scripts/environment.sh .venv $(cuda_build); \
	else \
		bash scripts/environment.sh .venv $(cpu_build); \
	fi

quickstart: $(venv)  ## train softmax, chunked and gated, compare them on one page, sample from each; 10 minutes
	$(python) train.py configs/quickstart.py --attention softmax --train.minutes 2 --run-dir runs/quickstart-softmax
	$(python) train.py configs/quickstart.py --attention chunked --train.minutes 2 --run-dir runs/quickstart-chunked
	$(python) train.py configs/quickstart.py --attention gated --train.minutes 2 --run-dir runs/quickstart-gated
	$(python) compare.py runs/quickstart-softmax runs/quickstart-chunked runs/quickstart-gated \
		--out runs/quickstart.html --png runs/quickstart.png --note "$$(cat benchmarks/results/quickstart.txt)"
	$(python) sample.py runs/quickstart-softmax --prompt "def " --max-new-tokens 200
	$(python) sample.py runs/quickstart-chunked --prompt "def " --max-new-tokens 200
	$(python) sample.py runs/quickstart-gated --prompt "def " --max-new-tokens 200

zoo: quickstart  ## write the weights of the quickstart's models, each with a model card, to runs/zoo
	for mode in softmax chunked gated; do [ -e runs/zoo/$$mode ] || \
		$(python) convert.py export runs/quickstart-$$mode --format lineargpt --out runs/zoo/$$mode || exit; done

pytest := $(python) -m pytest -n logical --maxprocesses 4 --dist worksteal

# The type checker keeps one core busy, the tests the other.
check: $(venv)  ## lint and the fast tests, for the edit loop: 1 minute on 2 cores
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint test-fast

test-fast: $(venv)
	$(python) -m pytest -q -m 'fast and not thorough'

test: $(venv)  ## run all but the longest tests: 7 minutes on 2 cores, later starts 3
	$(pytest) -m 'not thorough'

test-thorough: $(venv)  ## run the longest tests, such as whole runs and commands: 9 minutes
	$(pytest) -m thorough

# pyright and its node come as wheels; without this setting it looks for newer versions on the internet.
lint: $(venv)  ## ruff, import-linter and pyright
	$(python) -m ruff check .
	.venv/bin/lint-imports --no-cache --no-logo
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(python) -m pyright

gpu-check:  ## compile kernels and training steps for an H200, without one: 8 minutes on 2 cores, 3 GB of disk
	@bash scripts/gpu_check.sh

tpu-check:  ## compile kernels for five generations of TPUs, without one: 8 minutes of CPU time, 1.4 GB of disk
	@bash scripts/tpu_check.sh

pages := README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md benchmarks data docs lra speech studies

docs: $(venv)  ## build the site of the documentation in build/site; with the page of the quickstart if there is one
	rm -rf build/pages
	mkdir -p build/pages
	ln -s $(addprefix '$(CURDIR)'/,$(pages)) build/pages
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo 'The site is in build/site; to look at it: $(python) -m http.server --directory build/site'

lock:  ## update requirements.lock after a change of the dependencies in pyproject.toml
	bash scripts/uv.sh pip compile --quiet --universal --python-version 3.12 --extra train --extra dev \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		pyproject.toml --output-file requirements.lock

lowest: .venv-lowest/.complete  ## run the fast tests with the lowest versions that pyproject.toml allows: 3 minutes
	.venv-lowest/bin/python -m pytest -q -m 'fast and not thorough'

.venv-lowest/.complete: pyproject.toml
	rm -f $@
	bash scripts/environment.sh .venv-lowest --resolution lowest-direct --requirement pyproject.toml --extra train \
		--extra dev

clean:  ## remove .venv and its like, the uv of the project and caches, never runs/
	rm -rf .venv .venv.new .venv-gpu .venv-tpu .venv-lowest .uv .pytest_cache .ruff_cache build dist lineargpt_ops.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
