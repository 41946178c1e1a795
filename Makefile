# Set-up, checks and starting points. `make` alone lists them.

PYTHON ?= python3
DOCKER ?= docker
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= anychip
VENV := .venv
NPU_VENV := .venv-npu
CLIENTS_VENV := .venv-clients
DEPLOY_VENV := .venv-deploy
OCR_VENV := .venv-ocr
ARM_VENV := .venv-arm
AUDIT_VENV := .venv-audit
BIN := $(VENV)/bin
SETUP := pyproject.toml $(patsubst %,plugins/%/pyproject.toml,ascend compat grpc hosting tools) constraints.txt deploy/install.py
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n logical --maxprocesses 8 --dist loadgroup --no-loadscope-reorder
# One process more than there are processors: in turn, each waits for a service to start.
SHARED := -n $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8))) --dist loadgroup --no-loadscope-reorder
PAIR := -n 2 --dist loadgroup --no-loadscope-reorder
NO_TESTS := 5
UNIT := tests/unit plugins/ascend/tests plugins/compat/tests plugins/grpc/tests plugins/tools/tests
OTHERS := tests --ignore=tests/unit
PATHS = $(filter tests/% plugins/%,$(ARGS))
# Tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
# Where tests keep screenshots of the page.
export ANYCHIP_TEST_ARTEFACTS ?= build/artefacts

.DEFAULT_GOAL := help
.PHONY: help demo serve install check test test-interop soak fuzz test-deploy lint format npu-environment clients-environment deploy-environment ocr-environment arm-environment test-ocr sbom audit bench clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed  ## start the service on the sample weights; needs no network once installed
	@exec $(BIN)/anychip demo $(ARGS)

serve: $(VENV)/.installed  ## start the service, e.g. make serve ARGS="--models yolov8n --port 9000"
	@exec $(BIN)/anychip serve $(ARGS)

install: $(VENV)/.installed  ## make .venv with the torch build for the accelerator that is here

check: lint  ## lint, types and every test that starts no process: three minutes
	$(PYTEST) $(PARALLEL) $(UNIT) $(ARGS)

# A choice (ARGS) may leave any phase of tests empty.
PHASES = status=$(NO_TESTS); \
	phase() { \
	    $(PYTEST) "$$@"; code=$$?; \
	    [ $$code = $(NO_TESTS) ] || status=$$code; \
	    [ $$code = 0 ] || [ $$code = $(NO_TESTS) ]; \
	};
ELSEWHERE := not soak and not nightly and not deploy and not interop

# First the unit room by itself, as packages that other rooms import change torch and logging for everybody; then what may
# share the processors; then, two at a time, what mostly waits and measures for how long; then, one by one, what needs the
# machine to itself.
test: lint  ## everything that a change must pass, e.g. make test ARGS="-k scheduler"
	@$(PHASES) \
	$(if $(PATHS),,phase $(PARALLEL) -m "not soak and not nightly" $(UNIT) $(ARGS) &&) \
	phase $(SHARED) -m "not paired and not alone and $(ELSEWHERE)" $(if $(PATHS),,$(OTHERS)) $(ARGS) && \
	phase $(PAIR) -m "paired and $(ELSEWHERE)" $(if $(PATHS),,$(OTHERS)) $(ARGS) && \
	phase -m "alone and $(ELSEWHERE)" $(if $(PATHS),,$(OTHERS)) $(ARGS); \
	exit $$status

test-interop: $(VENV)/.developer  ## with vendors' packages, other people's exporters, clients, compilers, a browser, Prometheus
	@$(PHASES) \
	phase $(SHARED) -m "interop and not alone and not soak and not nightly" $(ARGS) && \
	phase -m "interop and alone and not soak and not nightly" $(ARGS); \
	exit $$status

soak: lint  ## the long tests: leaks and load for an hour
	$(PYTEST) -m soak $(ARGS)

fuzz: $(VENV)/.developer $(AUDIT_VENV)/.installed  ## readers of strangers' bytes for as long as ANYCHIP_TEST_FUZZ_EXAMPLES says (default 20000 each)
	ANYCHIP_TEST_FUZZ_EXAMPLES=$${ANYCHIP_TEST_FUZZ_EXAMPLES:-20000} $(PYTEST) $(PARALLEL) tests/unit/test_fuzz.py $(ARGS)
	$(PYTEST) -m soak tests/unit/test_checkpoint_fuzz.py $(ARGS)
	$(PYTEST) -m soak tests/service/test_described_api.py $(ARGS)

test-deploy: $(DEPLOY_VENV)/.installed  ## images, chart, manifests and Ray for real; apt-get install buildah debootstrap for images
	$(DEPLOY_VENV)/bin/python -m pytest $(PAIR) -m deploy $(ARGS)

test-ocr: $(OCR_VENV)/.installed  ## plugins/ocr, compared with RapidOCR from the same networks; apt-get install fonts-wqy-zenhei
	$(OCR_VENV)/bin/python -m pytest -n 2 --dist loadfile plugins/ocr/tests $(ARGS)

lint: $(VENV)/.developer  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.developer  ## write the code the way lint wants it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

npu-environment: $(NPU_VENV)/.installed  ## make .venv-npu, in which tests run Huawei's own torch_npu over a stub driver

clients-environment: $(CLIENTS_VENV)/.installed  ## make .venv-clients, in which tests run other people's clients

deploy-environment: $(DEPLOY_VENV)/.installed  ## make .venv-deploy, with Ray and what checks images and charts

ocr-environment: $(OCR_VENV)/.installed  ## make .venv-ocr, with plugins/ocr, RapidOCR and PP-OCR's networks

arm-environment: $(ARM_VENV)/.installed  ## make .venv-arm, in which tests run Python for ARM by qemu; apt-get install qemu-user-static

image-%: Dockerfile.%  ## build an image, e.g. make image-cuda IMAGE=registry.example.com/anychip; DOCKER names another builder; mlu: ARGS="--build-arg BASE_IMAGE=…"
	$(DOCKER) build --file $< --tag $(IMAGE):$(VERSION)-$* --build-arg REVISION="$$(git rev-parse HEAD)" $(ARGS) .

sbom: $(VENV)/.installed  ## write sbom.cdx.json: what .venv holds, as CycloneDX; each image has its own
	$(BIN)/python deploy/sbom.py sbom.cdx.json

# Without a network: a copy of the advisories that speaks OSV's interface, ARGS="-s osv --osv-url http://mirror/v1/query".
audit: $(VENV)/.installed $(AUDIT_VENV)/.installed  ## known vulnerabilities of what .venv holds; needs a network or a mirror
	$(AUDIT_VENV)/bin/pip-audit --progress-spinner off --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(ARGS)

bench: $(VENV)/.installed  ## load over HTTP, e.g. make bench ARGS=--help
	$(BIN)/python -m benchmarks.http_load $(ARGS)

clean:  ## remove the virtual environments and everything else that was generated
	rm -rf $(VENV) $(NPU_VENV) $(CLIENTS_VENV) $(DEPLOY_VENV) $(OCR_VENV) $(ARM_VENV) $(AUDIT_VENV) sbom.cdx.json wheelhouse build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two stamps, because a demo should not wait for what only the tests need.
$(VENV)/.installed: $(SETUP)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("anychip needs Python 3.10 or newer, and $(PYTHON) is %d.%d: name another, as in make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) deploy/install.py $(VENV)
	@touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(PYTHON) deploy/install.py --dev $(VENV)
	@touch $@

$(NPU_VENV)/.installed: tests/environments/npu_environment.py $(SETUP)
	$(PYTHON) tests/environments/npu_environment.py $(NPU_VENV)
	@touch $@

$(CLIENTS_VENV)/.installed: tests/environments/clients_environment.py
	$(PYTHON) tests/environments/clients_environment.py $(CLIENTS_VENV)
	@touch $@

$(OCR_VENV)/.installed: tests/environments/ocr_environment.py plugins/ocr/pyproject.toml $(VENV)/.developer
	$(BIN)/python tests/environments/ocr_environment.py $(OCR_VENV)
	@touch $@

$(ARM_VENV)/.installed: tests/environments/arm_environment.py $(SETUP) $(VENV)/.installed
	$(BIN)/python tests/environments/arm_environment.py $(ARM_VENV)
	@touch $@

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10' 'schemathesis>=4.30'
	@touch $@

$(DEPLOY_VENV)/.installed: $(VENV)/.developer tests/environments/deploy_environment.py
	$(BIN)/python tests/environments/deploy_environment.py $(DEPLOY_VENV)
	@touch $@
