# Set-up, checks and starting points. `make` alone lists them.

PYTHON ?= python3
DOCKER ?= docker
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= anychip
VENV := .venv
CLIENTS_VENV := .venv-clients
DEPLOY_VENV := .venv-deploy
OCR_VENV := .venv-ocr
ARM_VENV := .venv-arm
AUDIT_VENV := .venv-audit
LEAST_VENV := .venv-least
NPU_VENV := .venv-npu
NEXT_VENV := .venv-next
NEXT_TORCH ?= 2.15.0
DIST_VENV := .venv-dist
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
SETUP := pyproject.toml $(patsubst %,plugins/%/pyproject.toml,ascend grpc hosting samples) constraints.txt deploy/install.py
MAKER := tests/environments/make.py
SUITES := $(BIN)/python -m tests.suites
PARALLEL := -n logical --maxprocesses 8 --dist loadgroup --no-loadscope-reorder
# Where it says a folder, environments are kept there for all clones: .ci/run sets it.
CACHED = $(if $(ANYCHIP_ENVIRONMENTS_CACHE),$(PYTHON) tests/environments/cached.py $(1) $(2),$(3))
# Tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
# NVIDIA's image pins packages that anychip needs in other versions. deploy/image/build.sh does the same.
unexport PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES PIP_USER
# What pyroma misses and the owner has yet to decide: CONTRIBUTING.md, "A release".
UNDECIDED := Licensing,Author,AuthorEmail,Url
# Where tests keep screenshots of the page.
export ANYCHIP_TEST_ARTEFACTS ?= build/artefacts

.DEFAULT_GOAL := help
.PHONY: help demo serve install check test nightly suite ci-base fuzz lint format clients-environment deploy-environment ocr-environment arm-environment audit-environment least-environment npu-environment next-environment sbom audit dist docs bench clean anew
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed  ## start the service on the sample weights; needs no network once installed
	@exec $(BIN)/anychip demo $(ARGS)

serve: $(VENV)/.installed  ## start the service, e.g. make serve ARGS="--models yolov8n --port 9000"
	@exec $(BIN)/anychip serve $(ARGS)

install: $(VENV)/.installed  ## make .venv with the torch build for the accelerator that is here

check: $(VENV)/.developer  ## while you work: lint, types and tests of pure logic; a minute
	@$(SUITES) check -- $(ARGS)

test: $(VENV)/.developer  ## what every change must pass, e.g. make test ARGS="-k scheduler"
	@$(SUITES) test -- $(ARGS)

suite: $(VENV)/.developer  ## suites by their names, e.g. make suite SUITE="faults ingress"; .ci/run takes those that changed paths choose
	@needed="$$($(SUITES) environments $(SUITE))"; [ -z "$$needed" ] || $(MAKE) --no-print-directory $$needed
	@$(SUITES) run $(SUITE) -- $(ARGS)

# Environments that cannot be made here leave tests out, which say so.
nightly: $(VENV)/.developer  ## everything else: images, ARM, other people's software, ten minutes of faults; make nightly ARGS=tests/service/test_chaos.py
	-@$(MAKE) --keep-going clients-environment deploy-environment ocr-environment arm-environment audit-environment least-environment npu-environment next-environment
	@$(SUITES) nightly -- $(ARGS)

ci-base:  ## write .ci/base: what LANDED names (default: HEAD) has landed, and .ci/run judges what changed since
	git rev-parse --verify "$(or $(LANDED),HEAD)^{commit}" > .ci/base

fuzz: $(VENV)/.developer $(AUDIT_VENV)/.installed  ## readers of strangers' bytes for as long as ANYCHIP_TEST_FUZZ_EXAMPLES says (default 20000 each)
	ANYCHIP_TEST_FUZZ_EXAMPLES=$${ANYCHIP_TEST_FUZZ_EXAMPLES:-20000} $(BIN)/python -m pytest $(PARALLEL) tests/unit/test_fuzz.py tests/unit/test_checkpoint_fuzz.py $(ARGS)
	$(BIN)/python -m pytest -m "" tests/service/test_api_description.py -k described $(ARGS)

lint: $(VENV)/.developer  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.developer  ## write the code the way lint wants it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clients-environment: $(CLIENTS_VENV)/.installed  ## make .venv-clients, in which tests run other people's clients

deploy-environment: $(DEPLOY_VENV)/.installed  ## make .venv-deploy, with Ray and what checks images and charts

ocr-environment: $(OCR_VENV)/.installed  ## make .venv-ocr, with plugins/ocr, RapidOCR and PP-OCR's networks

arm-environment: $(ARM_VENV)/.installed  ## make .venv-arm, in which tests run Python for ARM by qemu; apt-get install qemu-user-static

least-environment: $(LEAST_VENV)/.installed  ## make .venv-least, with packages in the least versions that pyproject.toml admits

npu-environment: $(NPU_VENV)/2.10.0/.installed $(NPU_VENV)/2.12.0.post3/.installed  ## make .venv-npu, with the torch_npu that users of older CANNs have, each with its torch: 12 GB

next-environment: $(NEXT_VENV)/.installed  ## make .venv-next, with the torch that comes after ours: 5 GB; NEXT_TORCH=… names another

audit-environment: $(AUDIT_VENV)/.installed  ## make .venv-audit, with what looks for faults that are known, and for requests that find new ones

image-%: Dockerfile.%  ## build an image, e.g. make image-cuda IMAGE=registry.example.com/anychip; DOCKER names another builder; mlu: ARGS="--build-arg BASE_IMAGE=…"
	$(DOCKER) build --file $< --tag $(IMAGE):$(VERSION)-$* --build-arg REVISION="$$(git rev-parse HEAD)" $(ARGS) .

sbom: $(VENV)/.installed  ## write sbom.cdx.json: what .venv holds, as CycloneDX; each image has its own
	$(BIN)/python deploy/sbom.py sbom.cdx.json

# Without a network: a copy of the advisories that speaks OSV's interface, ARGS="-s osv --osv-url http://mirror/v1/query".
audit: $(VENV)/.installed $(AUDIT_VENV)/.installed  ## known vulnerabilities of what .venv holds; needs a network or a mirror
	$(AUDIT_VENV)/bin/pip-audit --progress-spinner off --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(ARGS)

dist: $(DIST_VENV)/.installed  ## build wheels of anychip and its plugins into dist/, and check them; publishes nothing
	rm -rf dist build
	for each in . plugins/ascend plugins/grpc plugins/hosting plugins/ocr plugins/samples; do \
	    $(DIST_VENV)/bin/python -m build --outdir dist $$each && $(DIST_VENV)/bin/pyroma --min 10 --skip-tests $(UNDECIDED) $$each || exit 1; done
	$(DIST_VENV)/bin/twine check --strict dist/*
	$(DIST_VENV)/bin/check-wheel-contents dist/*.whl

docs: $(DOCS_VENV)/.installed  ## build the documentation's site, in both languages, into build/site/; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

bench: $(VENV)/.installed  ## load over HTTP, e.g. make bench ARGS=--help
	$(BIN)/python -m benchmarks.http_load $(ARGS)

clean:  ## remove the virtual environments and everything else that was generated
	rm -rf $(VENV) $(CLIENTS_VENV) $(DEPLOY_VENV) $(OCR_VENV) $(ARM_VENV) $(AUDIT_VENV) $(LEAST_VENV) $(NPU_VENV) $(NEXT_VENV) $(DIST_VENV) $(DOCS_VENV) sbom.cdx.json wheelhouse build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is asked for beside, as in ANYCHIP_EXTRAS=onnx make install, comes into an environment that is there already.
ifneq ($(and $(filter install,$(MAKECMDGOALS)),$(ANYCHIP_EXTRAS)$(ANYCHIP_TORCH)),)
$(VENV)/.installed: anew
endif

# Two stamps, because a demo should not wait for what only the tests need.
$(VENV)/.installed: $(SETUP)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("anychip needs Python 3.10 or newer, and $(PYTHON) is %d.%d: name another, as in make PYTHON=python3.12" % sys.version_info[:2])'
	$(call CACHED,developer,$(VENV),$(PYTHON) deploy/install.py $(VENV))
	@touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(if $(ANYCHIP_ENVIRONMENTS_CACHE),test -x $(BIN)/ruff ||) $(PYTHON) deploy/install.py --dev $(VENV)
	@touch $@

$(CLIENTS_VENV)/.installed: $(MAKER)
	$(call CACHED,clients,$(CLIENTS_VENV),$(PYTHON) $(MAKER) clients $(CLIENTS_VENV))
	@touch $@

$(OCR_VENV)/.installed: $(MAKER) plugins/ocr/pyproject.toml $(VENV)/.developer
	$(call CACHED,ocr,$(OCR_VENV),$(BIN)/python $(MAKER) ocr $(OCR_VENV))
	@touch $@

$(LEAST_VENV)/.installed: $(MAKER) $(VENV)/.developer
	$(call CACHED,least,$(LEAST_VENV),$(BIN)/python $(MAKER) least $(LEAST_VENV))
	@touch $@

$(ARM_VENV)/.installed: $(MAKER) $(SETUP) $(VENV)/.installed
	$(call CACHED,arm,$(ARM_VENV),$(BIN)/python $(MAKER) arm $(ARM_VENV))
	@touch $@

$(NPU_VENV)/2.10.0/.installed: BESIDE := torch==2.10.0 torchvision==0.25.0
$(NPU_VENV)/2.12.0.post3/.installed: BESIDE := torch==2.12.0 torchvision==0.27.0
$(NPU_VENV)/%/.installed:
	$(PYTHON) -m venv $(NPU_VENV)/$*
	$(NPU_VENV)/$*/bin/pip install --quiet --disable-pip-version-check $(BESIDE) pyyaml pytest pytest-asyncio pytest-timeout --editable . --editable plugins/ascend
	$(NPU_VENV)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps torch_npu==$*  # It asks for torch's CPU build, which the registry lacks.
	@touch $@

# It sees the packages of .venv. torchvision is that of our torch: the next one comes out after torch.
$(NEXT_VENV)/.installed: $(VENV)/.developer
	$(PYTHON) -m venv $(NEXT_VENV)
	$(BIN)/python -c 'from pathlib import Path; from deploy.install import link_packages; link_packages(Path("$(NEXT_VENV)/bin/python").absolute())'
	$(NEXT_VENV)/bin/pip install --quiet --disable-pip-version-check torch==$(NEXT_TORCH)
	$(NEXT_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable . $(patsubst %,--editable plugins/%,ascend grpc samples)
	@touch $@

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10' 'schemathesis>=4.30'
	@touch $@

$(DIST_VENV)/.installed:
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/pip install --quiet --disable-pip-version-check 'build>=1.2' 'check-wheel-contents>=0.6' 'pyroma>=5' 'twine>=6'
	@touch $@

$(DOCS_VENV)/.installed:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check 'mkdocs<2' 'mkdocs-material>=9.6,<10' 'mkdocs-static-i18n>=1.3,<2' 'jieba>=0.42'
	@touch $@

$(DEPLOY_VENV)/.installed: $(VENV)/.developer $(MAKER)
	$(call CACHED,deploy,$(DEPLOY_VENV),$(BIN)/python $(MAKER) deploy $(DEPLOY_VENV))
	@touch $@
