# `make help` lists the targets. Downloads and tools are stored in .tools/, build output in target/ and out/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

TOOLS := $(CURDIR)/.tools
HOST := $(shell rustc -vV | sed -n 's/^host: //p')

# The C library is linked statically, so that the binary runs in an empty image. `--target` keeps the flag away from
# build scripts and proc macros, which cannot be linked statically.
STATIC_RUSTFLAGS := -C target-feature=+crt-static

# Clippy, which is the compiler with more lints, compiles the tests, so that everything is parsed and checked once, not
# twice; the library, which its tests contain, is compiled without its lints (.ci/rustc). Warnings are errors:
# `-Dwarnings` is that of `cargo clippy -- -D warnings`, and the last variable is that of Cargo from version 1.97 on.
#
# The passes of LLVM, for the crates of the workspace, inline small functions, of which generic code consists, and remove
# what is superfluous then. The unit tests need 56 instead of 88 CPU-seconds, and their compilation 313 instead of 277;
# with `opt-level = 1` it needs over 860.
export LLVM_PASSES := function(sroa,early-cse,simplifycfg),cgscc(inline),$\
  function(sroa,early-cse<memssa>,instcombine<no-verify-fixpoint>,simplifycfg),globaldce
export CLIPPY_ARGS := -Dwarnings__CLIPPY_HACKERY__-Cpasses=$(LLVM_PASSES)__CLIPPY_HACKERY__
CARGO_TEST := RUSTC_WORKSPACE_WRAPPER="$(CURDIR)/.ci/rustc" CARGO_BUILD_WARNINGS=deny cargo test --locked

ENVOY_VERSION := 1.40.0
# Its modules are pinned in tests/kubernetes/go.mod, with Helm.
KUBERNETES_VERSION := 1.36.3
CARGO_DENY_VERSION := 0.20.2
CARGO_FUZZ_VERSION := 0.13.1
# The last release of Consul that Debian has.
CONSUL_VERSION := 1.8.7
# Only nightly compilers have libFuzzer's instrumentation.
FUZZ_TOOLCHAIN := nightly-2026-05-20
# Time for each fuzz target.
FUZZ_SECONDS := 60
# First seed of `make fuzz-meshes`.
FUZZ_SEED := $(shell date +%s)
FUZZ_TARGETS := $(notdir $(wildcard tests/fuzz/corpus/*))

# Length of `make soak`, and the seed of its random events.
SOAK_MINUTES := 30
SOAK_SEED := 1

.PHONY: build test conformance graph lab soak bench bench-soak fuzz fuzz-ambient fuzz-inputs fuzz-meshes audit run envoy tools clean help

build: ## the static release binary, out/istiod
	RUSTFLAGS="$(STATIC_RUSTFLAGS)" cargo build --profile dist --locked --bin istiod --target $(HOST)
	mkdir -p out
	install -m 0755 target/$(HOST)/dist/istiod out/istiod
	ln -sf istiod out/pilot-discovery

# $(call step,NAME,COMMAND): runs the command and records its time. The first failure prints the table and ends the run.
STEPS := target/test-steps.txt
define step
@mkdir -p target; printf '\n=== %s: %s\n' '$(1)' '$(2)'; begun=$$(date +%s); outcome=ok; $(2) || outcome=failed; \
printf '%-8s %-6s %5d s\n' '$(1)' "$$outcome" "$$(($$(date +%s) - begun))" >> $(STEPS); \
[ "$$outcome" = ok ] || { printf '\n'; cat $(STEPS); exit 1; }
endef

# A build from scratch is faster without the state of incremental compilation, which is kept only where it exists.
test: export CARGO_INCREMENTAL := $(if $(wildcard target/debug/incremental),1,0)
test: ## format check, lints, unit and integration tests; prints the time of each step
	@mkdir -p target && : > $(STEPS); date +%s > $(STEPS).begun
	$(call step,format,cargo fmt --all --check)
	@$(MAKE) --no-print-directory --jobs=2 test-tools test-build
	$(call step,tests,$(CARGO_TEST) --workspace)
	@printf '\n'; cat $(STEPS); printf '%-8s %-6s %5d s\n' total '' "$$(($$(date +%s) - $$(< $(STEPS).begun)))"

# The parts of `test` that run at the same time: while components are fetched, a core is free. Cargo uses all cores
# (MAKEFLAGS would make it share those of make). `--all-targets` would also compile the tests of libraries and binaries
# that have none, such as a second copy of the generated messages.
.PHONY: test-tools test-build
test-tools:
	$(call step,tools,$(MAKE) --no-print-directory --jobs=1 tools)
test-build:
	$(call step,build,MAKEFLAGS= $(CARGO_TEST) --workspace --tests --bench benches --no-run)

graph: ## prints the import graph of the modules, bottom up by level, with cycles if there are any
	@$(CARGO_TEST) --quiet --test integration -- --graph

lab: tools ## as root: two clusters on two networks with real API servers and Envoys; prints each step
	LAB=show $(CARGO_TEST) --quiet --test integration -- lab::mesh:: --skip lab::mesh::soak --test-threads 1

soak: tools ## as root: random changes and faults in the same mesh for SOAK_MINUTES (30), with SOAK_SEED
	LAB=show SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) \
	  $(CARGO_TEST) --quiet --test integration -- lab::mesh::soak --exact

# Profiles of `make conformance`, and those of its tests that run, as a regular expression.
CONFORMANCE_PROFILES := GATEWAY-HTTP,GATEWAY-TLS,GATEWAY-GRPC,MESH-HTTP,MESH-GRPC
CONFORMANCE_TESTS := .
# Settings of the mesh: experimental kinds, and the reasons in statuses that the specification demands.
CONFORMANCE_VALUES := -set env.PILOT_ENABLE_ALPHA_GATEWAY_API=true -set env.PILOT_GATEWAY_API_STANDARD_REASONS=true
# Features that Istio does not claim either.
CONFORMANCE_EXEMPT := MeshClusterIPMatching,UDPRoute

# Without root or Go it is skipped; with CI=true that is a failure.
conformance: ## as root: the Gateway API's conformance suite; its report is target/conformance/report.yaml
	@skip() { echo "skipped: $$1" >&2; [ "$${CI:-}" != true ] || exit 1; exit 0; }; \
	[ "$$(id -u)" = 0 ] || skip 'the namespaces of the conformance suite need root'; \
	command -v go >/dev/null || skip 'building the conformance suite needs Go (https://go.dev/dl)'; \
	$(MAKE_COMMAND) --no-print-directory tools; $(CARGO_TEST) --quiet --test integration --no-run; \
	rm -rf target/conformance; mkdir -p target/conformance; status=0; \
	$(TOOLS)/bin/cluster run -tools $(TOOLS) -istiod target/debug/istiod -charts charts \
	  -folder target/conformance/cluster $(CONFORMANCE_VALUES) -- \
	  $(TOOLS)/bin/gateway-conformance -test.v -test.timeout=0 '-test.run=^TestConformance$$/$(CONFORMANCE_TESTS)' \
	  -gateway-class=istio -conformance-profiles=$(CONFORMANCE_PROFILES) -all-features \
	  -exempt-features=$(CONFORMANCE_EXEMPT) -namespace-labels=istio-injection=enabled \
	  -usable-address=infra-backend-v1.gateway-conformance-infra.svc.cluster.local -unusable-address=foo \
	  -organization=istiod -project=istiod -url=https://example.com -version=main -contact=maintainers \
	  -cleanup-base-resources=false -report-output=$(CURDIR)/target/conformance/report.yaml \
	  > target/conformance/output.log 2>&1 || status=$$?; \
	grep -aE '^ *--- (FAIL|SKIP)' target/conformance/output.log || true; \
	printf '%s of %s tests passed; see target/conformance/\n' \
	  "$$(grep -acE '^    --- PASS' target/conformance/output.log)" \
	  "$$(grep -acE '^    --- (PASS|FAIL)' target/conformance/output.log)"; exit $$status

# The benches of `make bench`. Their figures are written to target/bench/NAME.json.
BENCHES := steps generation suite kubernetes ca template admission scale
BENCH := cargo bench --profile dist --locked --bench benches --
# If set, the new figures replace those in benches/figures.json.
BENCH_KEEP :=
# The part of the hundred thousand connections and changes that `make bench-soak` makes.
SOAK_PART := 1

bench: tools ## all benches (see tests/README.md); compares with the kept figures (BENCH_KEEP=1 replaces them)
	@rm -rf target/bench; failed=; for bench in $(BENCHES); do printf '\n=== %s\n' "$$bench"; \
	  $(BENCH) "$$bench" $(if $(BENCH_KEEP),--keep) || failed="$$failed $$bench"; done; \
	$(BENCH) report; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

bench-soak: ## 100,000 short connections and changes; fails if memory varies by over 5 % (SOAK_PART: fraction)
	$(BENCH) scale soak --part $(SOAK_PART)

fuzz: fuzz-meshes fuzz-ambient fuzz-inputs ## random meshes, ztunnels, then libFuzzer

fuzz-ambient: ## 10,000 random changes of ambient meshes against generation from scratch, and with model ztunnels
	$(CARGO_TEST) --quiet --lib -- --ignored ten_thousand_changes

fuzz-meshes: envoy ## rules that random meshes keep, and real Envoys (as root), FUZZ_SECONDS (60) each, from seed FUZZ_SEED (the time)
	@echo 'ISTIOD_FUZZ_SEED=$(FUZZ_SEED)'
	@for trial in properties::meshes_are_consistent accept::random_meshes; do \
	  ISTIOD_FUZZ_SEED=$(FUZZ_SEED) ISTIOD_FUZZ_SECONDS=$(FUZZ_SECONDS) \
	    $(CARGO_TEST) --quiet --test integration -- $$trial --exact; \
	done

# Findings are written to target/fuzz. Add a failing input to tests/fuzz/corpus. The daemon's lock file is used, so that
# the fuzzed dependencies are those of the release.
fuzz-inputs: $(TOOLS)/bin/cargo-fuzz $(TOOLS)/rustup/$(FUZZ_TOOLCHAIN) ## libFuzzer on the targets of tests/fuzz, FUZZ_SECONDS (60) each; FUZZ_TARGETS="a b" selects targets
	cp Cargo.lock tests/fuzz/Cargo.lock
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p target/fuzz/corpus/$$target target/fuzz/artifacts/$$target; \
	  printf '\n=== %s\n' "$$target"; \
	  ISTIOD_FUZZ_TARGET=$$target RUSTUP_HOME=$(TOOLS)/rustup PATH="$(TOOLS)/bin:$$PATH" \
	    cargo +$(FUZZ_TOOLCHAIN) fuzz run --fuzz-dir tests/fuzz --target-dir target/fuzz/build target \
	    target/fuzz/corpus/$$target tests/fuzz/corpus/$$target -- -max_total_time=$(FUZZ_SECONDS) -timeout=20 \
	    -rss_limit_mb=4096 -max_len=65536 -artifact_prefix=target/fuzz/artifacts/$$target/ -print_final_stats=1; \
	done

$(TOOLS)/bin/cargo-fuzz:
	cargo install --locked --root $(TOOLS) --version $(CARGO_FUZZ_VERSION) cargo-fuzz

$(TOOLS)/rustup/$(FUZZ_TOOLCHAIN):
	@command -v rustup >/dev/null || { echo 'rustup is missing; it installs the nightly compiler' >&2; exit 1; }
	RUSTUP_HOME=$(TOOLS)/rustup rustup toolchain install $(FUZZ_TOOLCHAIN) --profile minimal --no-self-update
	touch $@

audit: $(TOOLS)/bin/cargo-deny ## licences, bans, duplicates and sources of every dependency
	PATH="$(TOOLS)/bin:$$PATH" cargo deny --locked check licenses bans sources

$(TOOLS)/bin/cargo-deny:
	cargo install --locked --root $(TOOLS) --version $(CARGO_DENY_VERSION) cargo-deny

run: ## a small mesh with real Envoys on this machine; Ctrl-C ends it
	python3 samples/helloworld/run.py

envoy: $(TOOLS)/py/envoy-$(ENVOY_VERSION) ## Envoy alone, below .tools/; `make run` needs no other tool

tools: envoy ## Envoy, Kubernetes, etcd, Helm, Prometheus, Consul, Eureka, iptables and the conformance suite, below .tools/, and Chromium; needs Go, apt-get, and Maven with Java 17 for Eureka
tools: $(TOOLS)/kubernetes-$(KUBERNETES_VERSION) $(TOOLS)/bin/etcd $(TOOLS)/iptables $(TOOLS)/conformance
tools: $(TOOLS)/bin/prometheus $(TOOLS)/bin/consul-$(CONSUL_VERSION) $(TOOLS)/eureka.jar chromium

# The stamp carries the version, so that a new version is installed.
$(TOOLS)/py/envoy-$(ENVOY_VERSION):
	python3 samples/fetch_envoy.py $(ENVOY_VERSION) $(TOOLS)/py/bin/envoy
	touch $@

# Less frequent garbage collection in the compiler saves a sixth of its CPU time, and omitted debug information a tenth.
# As in the releases of Kubernetes, CoreDNS and Helm, no C code is compiled and linked. The modules share compiled
# packages, because their flags are the same.
GO := CGO_ENABLED=0 GOGC=400 go
GO_FLAGS := -gcflags=all=-dwarf=false -ldflags "-s -w \
  -X k8s.io/component-base/version.gitVersion=v$(KUBERNETES_VERSION) \
  -X k8s.io/component-base/version.gitMajor=1 \
  -X k8s.io/component-base/version.gitMinor=$(word 2,$(subst ., ,$(KUBERNETES_VERSION)))"

# The API server, the controllers and Helm. The version of Kubernetes is linked in, as in releases: the API server
# reports it to its clients.
$(TOOLS)/kubernetes-$(KUBERNETES_VERSION): tests/kubernetes/go.mod tests/kubernetes/go.sum $(wildcard tests/kubernetes/*/*.go)
	@command -v go >/dev/null || { echo 'building Kubernetes and Helm needs Go (https://go.dev/dl)' >&2; exit 1; }
	$(GO) build -C tests/kubernetes -o $(TOOLS)/bin/ $(GO_FLAGS) tool ./controllers
	touch $@

# The node agent, the DNS server, the applications and the suite, and the CRDs of the Gateway API. The stamp is older
# than a source that changed. Vet, which `go test` runs by default, would parse and check all 730 packages below the
# suite once more.
$(TOOLS)/conformance: tests/conformance/go.mod tests/conformance/go.sum $(wildcard tests/conformance/*/*.go)
	@command -v go >/dev/null || { echo 'building the conformance suite needs Go (https://go.dev/dl)' >&2; exit 1; }
	$(GO) build -C tests/conformance -o $(TOOLS)/bin/ $(GO_FLAGS) tool ./cluster ./coredns
	$(GO) test -C tests/conformance -c -vet=off -o $(TOOLS)/bin/gateway-conformance $(GO_FLAGS) ./suite
	rm -rf $(TOOLS)/gateway-api && mkdir $(TOOLS)/gateway-api
	cp $$(go list -C tests/conformance -m -f '{{.Dir}}' sigs.k8s.io/gateway-api)/config/crd/experimental/gateway*.yaml \
	  $(TOOLS)/gateway-api
	touch $@

# Without it, its test is skipped. Maven runs for seconds only, too short for the JVM's optimising compiler to save what
# it costs.
$(TOOLS)/eureka.jar: tests/eureka/pom.xml $(wildcard tests/eureka/src/main/java/eureka/*.java)
	@MAVEN_OPTS="-XX:TieredStopAtLevel=1 $${MAVEN_OPTS:-}" \
	  mvn -q -B -f tests/eureka/pom.xml package && cp target/eureka/eureka.jar $@ \
	  || echo 'Eureka is not built, so its test is skipped; it needs Maven, Java 17 and Maven Central' >&2

# It needs many libraries, so that it is installed. Without root, its test is skipped, unless it is there.
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { [ "$$(id -u)" = 0 ] && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; } \
	  || echo 'Chromium is not installed, so its test is skipped; install the package chromium' >&2

# The package is unpacked, not installed, so that an etcd of the system stays as it is.
$(TOOLS)/bin/etcd:
	@rm -rf $(TOOLS)/etcd && mkdir -p $(TOOLS)/etcd $(TOOLS)/bin
	@[ "$$(id -u)" != 0 ] || apt-get update -qq
	cd $(TOOLS)/etcd && apt-get download -qq etcd-server && dpkg -x etcd-server_*.deb . && mv usr/bin/etcd $@
	rm -rf $(TOOLS)/etcd

$(TOOLS)/bin/prometheus:
	@rm -rf $(TOOLS)/prometheus && mkdir -p $(TOOLS)/prometheus $(TOOLS)/bin
	@[ "$$(id -u)" != 0 ] || apt-get update -qq
	cd $(TOOLS)/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && mv usr/bin/promtool usr/bin/prometheus $(TOOLS)/bin
	rm -rf $(TOOLS)/prometheus

# Unpacked in the same way, with its libraries. The tests set rules only in their own network namespaces.
$(TOOLS)/iptables:
	@rm -rf $@.part && mkdir -p $@.part
	@[ "$$(id -u)" != 0 ] || apt-get update -qq
	cd $@.part && apt-get download -qq iptables libxtables12 libip4tc2 libip6tc2 && for package in *.deb; do dpkg -x "$$package" .; done
	rm -f $@.part/*.deb && mv $@.part $@

# From an older suite of the system's own mirror; the system's sources and lists stay as they are. Where that suite does
# not exist, the tests that need Consul are skipped.
$(TOOLS)/bin/consul-$(CONSUL_VERSION):
	@rm -rf $(TOOLS)/consul && mkdir -p $(TOOLS)/bin $(TOOLS)/consul/lists/partial $(TOOLS)/consul/cache/archives/partial
	@apt-get indextargets --format '$$(CODENAME) $$(REPO_URI)' | awk '$$1 !~ /-/ && !found++ { print \
	  "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] " $$2 " bullseye main" }' > $(TOOLS)/consul/sources.list
	@cd $(TOOLS)/consul && for step in update 'download consul'; do \
	  apt-get -qq -o Dir::Etc::sourcelist=$$PWD/sources.list -o Dir::Etc::sourceparts=- -o Dir::State::lists=$$PWD/lists \
	    -o Dir::Cache=$$PWD/cache $$step || break; \
	done && dpkg -x consul_*.deb . && mv usr/bin/consul $@ || echo 'Consul is not available here; its tests are skipped' >&2
	rm -rf $(TOOLS)/consul

clean: ## removes all build output; .tools/ stays
	cargo clean
	rm -rf out

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
