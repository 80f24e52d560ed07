# Everything below runs on Debian 12 or later, as root, with a Rust toolchain, a C compiler and make.

TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
BIN_DIR := $(TARGET_DIR)/release
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
export SUITE ?= trixie
BENCH_DIR ?= /var/tmp

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

# An engine calls cryopod-runtime several times for each container: linked statically it starts in less time. The
# others load libraries at run time and cannot be static.
build: ## release binaries, in target/release
	cargo build --release $(BUILD)
	RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" cargo build --release \
		--package cryopod-runtime --target $(HOST)
	install -m 755 $(TARGET_DIR)/$(HOST)/release/cryopod-runtime $(BIN_DIR)/cryopod-runtime

packages: ## deb and rpm packages and a tarball, in target/packages; docs/install.md
	packages/build --check
	$(MAKE) --no-print-directory build
	CRYOPOD_BIN_DIR=$(BIN_DIR) packages/build

test: ## format, lints, units, the simulated driver, the real container stack (half of it by turns; TURN=both: all)
	tests/run

test-list: ## the names of the tests of the real stack
	@cargo test --quiet --workspace --test real-stack -- --list | sed -n 's/: test$$//p'

test-one: ## one test of the real stack: make test-one T=PART-OF-ITS-NAME [SUITE=forky]
	@all=$$($(MAKE) --no-print-directory test-list) || exit 1; \
	case "$$all" in *'$(T)'*) ;; *) printf 'No test has %s in its name. There are:\n%s\n' '$(T)' "$$all" >&2; exit 1; esac
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- $(T)

test-long: ## hours: hostile containers, all moments at which something dies, the property test and the fuzz targets, each for long
	PROPTEST_CASES=100000 cargo test --quiet --package cryopod-operations reach
	HOSTILE_ROUNDS=500 FAULTS=all CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- --test-threads=2 hostile:: shim::what_dies migrate::
	CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- --test-threads=2 --skip swarm --skip tutorial::gpu
	SUITE=forky CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- --test-threads=2
	SHAPES=all CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- --nocapture containers::shapes
	cargo build --quiet --workspace
	for low in crun runc; do CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/mutations $$low 10000 1 $$(nproc) || exit 1; done
	STORE_ROUNDS=100 CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- store::
	FAULT_ROUNDS=160 CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- on_stop::faults
	SWARM_PART=all CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- on_stop::swarm
	MOMENTS=50 MOMENTS_SEED=2 CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- vram::one_moment
	NCCL_ROUNDS=200 cargo test --quiet --package cryopod-simdriver --test nccl
	for round in 1 2 3 4 5; do CRYOPOD_REQUIRE_REAL=1 cargo test --quiet --workspace --test real-stack -- archive::killed archive::registry || exit 1; done
	$(MAKE) --no-print-directory campaign ROUNDS=500 JOBS=$$(nproc)
	$(MAKE) --no-print-directory campaign-power soak
	CRYOPOD_REQUIRE_REAL=1 $(MAKE) --no-print-directory test-vm
	CRYOPOD_REQUIRE_REAL=1 $(MAKE) --no-print-directory test-vm SUITE=forky CASES='amd_one amd_gpus amd_moves amd_switches amd_failures amd_failed_restores'
	fuzz/run 4200

campaign: ## random operations with random faults, and a model of what must hold: SEED, ROUNDS, JOBS as tests/campaign says
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/campaign $(or $(SEED),$(shell date +%s)) $(or $(ROUNDS),20) $(or $(JOBS),1) "$(LOW)" "$(ONLY)"

campaign-power: ## power cuts at random points of checkpoint, export, pack, prune, cache fill: SEED, CUTS
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/power-cuts $(or $(SEED),$(shell date +%s)) $(or $(CUTS),200)

soak: ## containers are checkpointed and restored again and again: what grows with it: CYCLES, KIND=alone or many
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/soak $(or $(CYCLES),500) $(KIND)

test-packages: ## the packages: installed, used and removed on Debian 12 and 13; upgrades; linters. Long; its head says which parts
	$(MAKE) --no-print-directory build BUILD=--workspace
	CRYOPOD_BIN_DIR=$(BIN_DIR) tests/packages/run $(PARTS)

testbed: ## the Debian root that the real-stack tests run in; SUITE=forky or experimental for newer ones
	tests/testbed/testbed up

test-vm: ## the tests that need real device nodes, in an emulated machine, an hour; docs/testbed.md
	$(MAKE) --no-print-directory build
	LONG=1 CRYOPOD_BIN_DIR=$(BIN_DIR) tests/vm/run $(CASES)

test-amd: ## what owners of AMD GPUs run, on GPUs that answer and do not exist; docs/amd.md
	$(MAKE) --no-print-directory test-vm CASES=amd_hardware

demo: ## containers with and without GPUs are checkpointed, removed, restored and copied
	$(MAKE) --no-print-directory --jobs 2 demo-build testbed
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/demo tests/testbed/testbed enter -- /src/examples/demo.sh

demo-build: # what the demo runs, and no more
	cargo build --profile demo --package cryopod --package cryopod-runtime --package cryopod-criu-plugin --package cryopod-simdriver

picture: ## the README's picture, docs/picture.svg, from what a terminal shows
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/testbed/testbed enter -- /src/docs/picture.sh | awk -f docs/draw.awk > docs/picture.svg

test-browser: ## the page of `cryopod inspect --html` in Chromium; the first time it downloads 130 MB
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/browser/run

screenshots: ## docs/inspect.png and docs/inspect-phone.png, from that page, and docs/top.svg
	cargo build --quiet --workspace
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug PICTURES=docs tests/browser/run
	CRYOPOD_BIN_DIR=$(TARGET_DIR)/debug tests/testbed/testbed enter -- /src/docs/top.sh | awk -f docs/draw.awk > docs/top.svg

bench: testbed ## what cryopod costs; docs/benchmarks.md
	$(MAKE) --no-print-directory build BUILD=--workspace
	CRYOPOD_BIN_DIR=$(BIN_DIR) tests/testbed/testbed enter -- \
		bash -euc '. /src/tests/testbed/lib.sh; bundle /tmp/b sleep 1000; /opt/build/bench-runtime /tmp/b 200 crun runc; /src/tests/bench-plan.sh'
	CRYOPOD_BIN_DIR=$(BIN_DIR) tests/testbed/testbed enter --cgroup v1 -- bash -euo pipefail -c \
		'. /src/tests/testbed/lib.sh; . /src/tests/tests/scripts/shim/lib.sh; . /src/tests/tests/scripts/shim/cost.sh'
	tests/bench/nccl-call.sh $(BIN_DIR)

bench-archive: testbed ## how fast archives are written and read; GIB, ROUNDS, KINDS as tests/bench/archive.sh says
	$(MAKE) --no-print-directory build BUILD=--workspace
	mkdir -p $(BENCH_DIR)
	CRYOPOD_BIN_DIR=$(BIN_DIR) tests/testbed/testbed enter --bind $(BENCH_DIR):/bench -- env WORK=/bench /src/tests/bench/archive.sh

gpu-test: build ## the tests that need an NVIDIA GPU
	tests/gpu/run.sh

# The documents as a book: with the mdbook that is installed, or one that the first call builds, in some minutes.
MDBOOK := $(or $(shell command -v mdbook),$(TARGET_DIR)/tools/bin/mdbook)
book: $(MDBOOK) ## the documents as a book, in target/book
	$(MDBOOK) build --dest-dir $(TARGET_DIR)/book

$(TARGET_DIR)/tools/bin/mdbook:
	cargo install --locked --version 0.5.4 --no-default-features --features search --root $(TARGET_DIR)/tools mdbook

deny: ## licences, sources and known vulnerabilities of all dependencies
	tests/deny

clean: ## what was built; `tests/testbed/testbed down` removes the test bed
	cargo clean

.PHONY: help build packages test test-packages test-list test-one test-long campaign campaign-power soak testbed test-vm test-amd demo demo-build picture test-browser screenshots book bench bench-archive gpu-test deny clean
