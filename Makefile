# The same few words for a person and for CI; each sets up what it needs in .venv.
#
#   make demo                   export, tune, verify and run the shipped checkpoint, with the times
#   make test                   everything quick
#   make test-slow              what takes long, or needs a server, a browser or an install
#   make lint                   ruff and mypy
#   make bench [FIGURE=NAME]    one JSON object a line
#   make evaluate               the evidence: RESULTS.md, results.json, figures; resumable
#                               (QUICK=1: small, into evidence/out;
#                               MODEL=FOLDER TASKS="A B" TARGET=cuda:
#                               another checkpoint, into evidence/out)
#   make readme                 write the tree of files into README.md
#   make clean                  remove all that the others made
#
#   PYTHON=python3.12           the interpreter of .venv; the first of 3.11 to 3.14 otherwise
#   TORCH_INDEX=URL             a further index for pip, for instance one of CPU builds of torch

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
    && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/seconds-to-install
EXTRAS := export,tune,dev
HARNESS := $(VENV)/harness-installed

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-slow lint bench evaluate readme clean

STARTED := $(shell date +%s)

# torch's models here are small: a second thread gains little, and while it waits for a core that
# another process has, all wait for it (export was 16 times slower so).
export OMP_NUM_THREADS ?= 1

# --no-compile: Python compiles what is imported, instead of all of torch here.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.14 found; say make PYTHON=..." >&2; exit 2; }
	@echo "installing into $(VENV) (once)"
	@start=$$(date +%s); \
	$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV); \
	$(PY) -m pip install --quiet --no-compile --constraint constraints.txt \
	    $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --editable '.[$(EXTRAS)]'; \
	echo $$(( $$(date +%s) - start )) > $@

# Apart, so that the demo does not wait for it: half a minute and 500 MB, for tests alone.
$(HARNESS): $(INSTALLED)
	@echo "installing lm-evaluation-harness into $(VENV) (once)"
	@$(PY) -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[harness]'
	@touch $@

comma := ,

# $(call timed,NAME,COMMAND): run it, and note its seconds for the closing lines.
define timed
@echo; echo "\$$ $(2)"; start=$$(date +%s); \
$(VENV)/bin/$(2); \
echo "$(1) $$(( $$(date +%s) - start ))" >> demo/seconds
endef

demo: $(INSTALLED)
	@mkdir -p demo
	@if test "$$(stat -c %Y $(INSTALLED))" -ge $(STARTED); \
	then echo "installation $$(cat $(INSTALLED))"; \
	else echo "installation 0 (earlier: $$(cat $(INSTALLED)) s)"; fi > demo/seconds
	$(call timed,export,cadenza export calib_data/reference -o demo/export --force)
	$(call timed,tune,cadenza tune demo/export -o demo/bundle --latency-ms 85% --mode quick --cache demo/cache --force)
	$(call timed,verify,cadenza verify demo/bundle)
	$(call timed,run,cadenza run demo/bundle --task edit 'edit:ab$(comma)aabbccddabcd')
	@echo; awk '{ said = $$2 " s"; for (i = 3; i <= NF; i++) said = said " " $$i; \
	    printf "%-13s %s\n", $$1, said; total += $$2 } \
	    END { printf "%-13s %d s\n", "total", total }' demo/seconds

demo/bundle/manifest.json:
	@$(MAKE) demo

test: $(HARNESS)
	$(PY) -m pytest -m "not slow"

test-slow: $(HARNESS)
	$(PY) -m pytest -m slow

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED) demo/bundle/manifest.json
	@$(PY) -m tests.bench $(FIGURE)

evaluate: $(INSTALLED)
	$(PY) -m tests.evidence $(if $(QUICK),--quick) $(if $(MODEL),--model "$(MODEL)") \
	    $(if $(TARGET),--target $(TARGET)) $(foreach task,$(TASKS),--task "$(task)")

readme: $(INSTALLED)
	$(PY) -m tests.readme

clean:
	rm -rf $(VENV) demo evidence dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
