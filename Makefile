# make demo       compile a small Llama-style decode step and show what happened to it
# make test       lint, then the test suite (what CI runs)
# make site       the documentation as a website with search, in site/
# make test-torch TORCH=2.15.0   the test suite on another torch, in an environment of its own
# They set everything up on a fresh machine and do not repeat it when nothing changed.

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
JOBS   ?= 2

.PHONY: demo test test-full test-torch fuzz lint format docs site pictures bench bench-models test-gpu bench-gpu bench-models-gpu bench-stock-gpu sanitize-gpu clean

$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt torch numpy
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(RUN) examples/demo.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

test: lint
	$(RUN) -m pytest -n $(JOBS) -m 'not full and not cuda'
	$(RUN) -m pytest -n $(JOBS) -m 'not full and not cuda' tests/ascend

test-full: lint
	$(RUN) -m pytest -n $(JOBS) -m 'not cuda' --hypothesis-profile=default
	$(RUN) -m pytest -n $(JOBS) -m 'not cuda' tests/ascend

# PyPI's torch is a CUDA build: about 5 GB. The constraints keep it, and the Triton that it was made with.
.venv-torch-%/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==$* numpy
	$(@D)/bin/python -m pip freeze | grep -E '^(torch|triton)==' > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt -e '.[dev]'
	touch $@

test-torch:
	@test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.15.0"; exit 2; }
	$(MAKE) .venv-torch-$(TORCH)/.ready
	.venv-torch-$(TORCH)/bin/python -m pytest -n $(JOBS) -m 'not full and not cuda'
	.venv-torch-$(TORCH)/bin/python -m pytest -n $(JOBS) -m 'not full and not cuda' tests/ascend

fuzz: $(READY)
	$(RUN) -m tests.fuzz.run --programs 20000 --jobs $(JOBS)

docs: $(READY)
	$(RUN) docs/generate.py

# The website is built in an environment of its own: nothing else needs what builds it.
.venv-site/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['site'], sep='\n')" > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet -r $(@D)/requirements.txt
	touch $@

site: .venv-site/.ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet --strict
	@echo "python3 -m http.server -d site   then open http://localhost:8000; search needs a server"

pictures: $(READY)
	$(RUN) docs/pictures/make.py

bench: $(READY)
	$(RUN) benchmarks/host_overhead.py
	$(RUN) benchmarks/memory.py
	$(RUN) benchmarks/fusion_compile.py
	$(RUN) benchmarks/compile_time.py
	$(RUN) benchmarks/report.py

# Models on the CPU, compiled by Inductor and by graphex: about an hour on two cores.
bench-models: $(READY)
	PYTHONPATH=. $(RUN) benchmarks/models.py --device cpu --threads 1 2 --seconds 3600

# On a machine with a GPU, from the source tree as it is: torch, Triton, pytest, hypothesis, transformers, rich, click.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m 'not full' tests
	PYTHONPATH=. $(PYTHON) -m pytest -m 'not full' tests/ascend

bench-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/replay.py
	-PYTHONPATH=. $(PYTHON) benchmarks/replay_host.py
	-PYTHONPATH=. $(PYTHON) benchmarks/decode.py
	-PYTHONPATH=. $(PYTHON) benchmarks/generate.py --seconds 600
	PYTHONPATH=. $(PYTHON) benchmarks/compile_time.py
	-PYTHONPATH=. $(PYTHON) benchmarks/prefill.py
	PYTHONPATH=. $(PYTHON) benchmarks/memory.py
	PYTHONPATH=. $(PYTHON) benchmarks/kernels.py
	PYTHONPATH=. $(PYTHON) benchmarks/linears.py
	PYTHONPATH=. $(PYTHON) benchmarks/attention.py
	PYTHONPATH=. $(PYTHON) benchmarks/streams.py

bench-models-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/models.py

# The stock modes beside which decode.py and replay.py show graphex. They compile for long: call it until none is missing.
bench-stock-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/decode_stock.py

sanitize-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/sanitize.py

clean:
	rm -rf $(VENV) .venv-torch-* .venv-site site build dist *.egg-info
