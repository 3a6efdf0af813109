# make train [PYTHON=python3.11] [ARGS='--epochs 1']
# make test  [PYTHON=python3.11]
# make lint  [PYTHON=python3.11], 3.8 or newer
#
# One virtual environment per interpreter: .venv/3.7, .venv/3.11, ...

ifndef PYTHON
PYTHON := $(shell sh find_python.sh)
endif
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error PYTHON='$(PYTHON)' does not run: name a working Python 3, as in PYTHON=python3.11)
endif
VENV := .venv/$(VERSION)

.PHONY: train test lint

train: $(VENV)/train-installed
	$(VENV)/bin/python train_multi_gpu.py --num_gpus 2 $(ARGS)

test: $(VENV)/test-installed
	$(VENV)/bin/python -m pytest -q -n 2 $(ARGS) tests

lint: $(VENV)/test-installed
	@[ -x $(VENV)/bin/ruff ] || { echo 'Python $(VERSION) has no linter: say PYTHON=python3.11'; exit 2; }
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Python 3.6's own pip finds no wheels of today.
$(VENV)/bin/pip:
	@$(PYTHON) -m venv $(VENV)
	@[ $(VERSION) != 3.6 ] || $(VENV)/bin/pip install -q -U 'pip<22'

$(VENV)/train-installed: requirements.txt | $(VENV)/bin/pip
	@echo 'installing into $(VENV); TensorFlow is several hundred megabytes'
	@$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements.txt
	@$(VENV)/bin/pip check
	@touch $@

$(VENV)/test-installed: requirements-test.txt $(VENV)/train-installed
	@echo 'installing what the tests need'
	@$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements.txt -r $<
	@$(VENV)/bin/pip check
	@touch $@
