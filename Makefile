# Common tasks. CMakePresets.json defines the builds; scripts/setup installs missing dependencies.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
# Tests wait for other processes and threads, so that each takes less than a core.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)
BENCHES = schedule microbatch attention runtime program
# Number of inputs that `make fuzz` gives each fuzzer; `make soak` uses more.
FUZZ_RUNS ?= 100000

# $(call quietly,command): prints the command's output only if it fails.
quietly = log=$$(mktemp); trap 'rm -f "$$log"' EXIT; $(1) >"$$log" 2>&1 || { cat "$$log"; exit 1; }
# $(call build,preset,targets): configures quietly, then builds the targets, or all of them if none is named.
define build
@$(call quietly,cmake --preset $(1))
@cmake --build --preset $(1) -j $(JOBS) $(if $(2),--target $(2))
endef

.PHONY: help setup build demo test lint format docs bench cpus cuda-check fuzz soak clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## train a small model, cut an exported one, draw and compare schedules
	@scripts/demo

test: setup ## run all tests, and those of the schedule layer under sanitizers too
	$(call build,release)
	@$(call quietly,cmake --preset asan-schedule)
	@$(call quietly,cmake --build --preset asan-schedule -j $(JOBS))
	@$(call quietly,ctest --preset asan-schedule --output-on-failure --no-tests=error -j $(JOBS))
	@echo "The schedule layer's tests pass under the address and undefined-behaviour sanitizers."
	@ctest --preset release --output-on-failure --no-tests=error -j $(TEST_JOBS)

# Without tests, benchmarks, fuzzers and examples.
build: setup ## build the library and the command into build/release
	$(call build,release,penstock_cli)

lint: ## check formatting, the API reference, clang-tidy and thread-safety annotations
	@scripts/setup lint
	@scripts/format --check
	@scripts/docs
	@$(call quietly,cmake --preset lint)
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	run-clang-tidy-19 -p build/lint -j $(JOBS) -quiet -extra-arg=-Wno-unknown-warning-option -extra-arg=-Wthread-safety \
	  '/Unity/unity_|^(?!.*/build/lint/).*/(penstock|tests|bench|examples)/' >"$$log" 2>&1 || \
	  { grep -vE '^Running clang-tidy|^\[ *[0-9]+/|warnings? (generated|treated)|^$$' "$$log"; exit 1; }

format: setup ## format the sources
	@scripts/format

docs: setup ## generate the API reference into build/docs/html
	@scripts/docs

bench: setup ## run the benchmarks, compared with torch.distributed.pipelining
	$(call build,release,penstock_cli $(BENCHES:%=penstock_%_bench))
	@for area in $(BENCHES); do \
	  echo; .venv/bin/python bench/$$area.py --bench build/release/bin/penstock_$${area}_bench; \
	done
	@for area in train memory; do echo; .venv/bin/python bench/$$area.py --penstock build/release/bin/penstock; done

# Each fuzzer starts from a copy of its corpus, so that new inputs stay out of the source tree. The corpus of fuzz_archive is
# extended by small exported models. Inputs that fail are kept in build/fuzz/found.
fuzz: ## run the fuzzers, FUZZ_RUNS inputs each
	@scripts/setup soak
	@$(call quietly,cmake --preset fuzz)
	@cmake --build --preset fuzz -j $(JOBS) --target fuzzers
	@mkdir -p build/fuzz/found; \
	corpora=$$(mktemp -d); \
	trap 'rm -rf "$$corpora"' EXIT; \
	cp -r tests/fuzz/corpus/. "$$corpora"; \
	tests/reference_python tests/program/models.py "$$corpora/programs" && \
	  find "$$corpora/programs" -name '*.pt2' -size -20k -exec cp {} "$$corpora/archive" \; || exit 1; \
	for subject in action archive csv metadata safetensors; do \
	  echo "fuzz_$$subject: $(FUZZ_RUNS) inputs"; \
	  build/fuzz/bin/fuzz_$$subject -runs=$(FUZZ_RUNS) -max_len=20000 -malloc_limit_mb=64 -timeout=10 \
	    -artifact_prefix=build/fuzz/found/$$subject- "$$corpora/$$subject" >"$$corpora/log" 2>&1 || \
	    { tail -n 60 "$$corpora/log"; echo "fuzz_$$subject: the input is in build/fuzz/found"; exit 1; }; \
	  tail -n 1 "$$corpora/log"; \
	done

# Settings by which libtorch, MKL and oneDNN choose the kernels of other CPUs.
CPU_SETTINGS = ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE \
  ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE
cpus: setup ## run all tests with the kernels of other CPUs
	$(call build,release)
	@for setting in $(CPU_SETTINGS); do \
	  echo "$$setting"; env $$setting ctest --preset release --output-on-failure --no-tests=error -j $(TEST_JOBS); \
	done

# Downloads gigabytes, so that it is no part of `make test`.
cuda-check: setup ## check the CUDA build of torch and the NCCL plugin, on GPUs or a stand-in (downloads 3 GB)
	@JOBS=$(JOBS) scripts/cuda_check

# Left out on devices, as in tests/runtime/CMakeLists.txt.
NOT_ON_DEVICES = PipelineReference*:LostRank*:*Lifetime*:IntraOpThreads*:Profiler*:MessageOrder*:Cancel*:Timeout*

soak: cpus ## run the long tests: other CPUs, sanitizers, full grids on processes and devices, Hugging Face, lost ranks, fuzzers
	@scripts/setup soak
	$(call build,asan)
	@ctest --preset asan --output-on-failure --no-tests=error -j $(JOBS)
	@tests/reference_python tests/program/zoo.py write build/soak/zoo
	@tests/reference_python tests/program/models.py build/soak/programs
	@PENSTOCK_ZOO=build/soak/zoo PENSTOCK_PROGRAMS=build/soak/programs tests/settings \
	  build/asan/bin/penstock_program_test --gtest_brief=1
	$(call build,tsan)
	@ctest --preset tsan --output-on-failure --no-tests=error -j $(JOBS)
	$(call build,tsan-torch)
	@ctest --preset tsan-torch --output-on-failure --no-tests=error
	@for ranks in 1 2 4; do \
	  PENSTOCK_GRID=whole build/release/bin/penstock_launch $$ranks build/release/bin/penstock_gloo_test --gtest_brief=1; \
	done
	@for devices in 1 4; do \
	  PENSTOCK_TEST_DEVICES=$$devices build/release/bin/penstock_runtime_test --gtest_brief=1 --gtest_filter=-$(NOT_ON_DEVICES); \
	  for carrier in staged direct; do for ranks in 1 2 4; do \
	    PENSTOCK_GRID=whole PENSTOCK_TEST_DEVICES=$$devices PENSTOCK_TEST_CARRIER=$$carrier \
	      build/release/bin/penstock_launch $$ranks build/release/bin/penstock_gloo_test --gtest_brief=1; \
	  done; done; \
	done
	@PENSTOCK_GRID=whole build/release/bin/penstock_device_processes_test --gtest_brief=1
	@scripts/setup hf
	@build/hugging_face/venv/bin/python tests/program/hugging_face.py write build/hugging_face/zoo
	@PENSTOCK_ZOO=build/hugging_face/zoo tests/settings \
	  build/release/bin/penstock_program_test --gtest_brief=1 --gtest_filter='*Zoo*'
	@PENSTOCK_GRID=whole PENSTOCK=build/release/bin/penstock PENSTOCK_ZOO=build/soak/zoo PENSTOCK_PROGRAMS=build/soak/programs \
	  tests/settings python3 tests/cli/program_test.py OnProcesses
	@PENSTOCK_KILLS=100 build/release/bin/penstock_runtime_test --gtest_filter='LostRank*'
	@export PENSTOCK_GRID=whole PENSTOCK_KILLS=100 PENSTOCK=$(CURDIR)/build/release/bin/penstock \
	  PENSTOCK_PROGRAMS=$(CURDIR)/build/soak/programs REFERENCE_PYTHON=$(CURDIR)/tests/reference_python; \
	tests/settings python3 tests/cli/train_test.py Sameness && tests/settings python3 tests/cli/train_files_test.py Checkpoints && \
	PENSTOCK_STRANGERS=20 tests/settings python3 tests/cli/strangers_test.py Connections && \
	PENSTOCK_FAULTS=all PENSTOCK_INJECT=$(CURDIR)/build/release/bin/penstock_inject.so tests/settings \
	  python3 tests/faults/faults_test.py
	@$(MAKE) fuzz FUZZ_RUNS=1000000
	@build/release/bin/penstock_operator_fuzz 5000 1
	@PENSTOCK_CASES=200000 build/release/bin/penstock_schedule_test --gtest_filter='Mutation*'

clean: ## remove build/; .venv stays
	@rm -rf build

setup:
	@scripts/setup
