# make demo | examples | test | test-all | test-sanitizers | bench | bench-gpu | compile-report | docs | lint. All run in .venv, which is made on the first call.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
CPU_INDEX := https://download.pytorch.org/whl/cpu
SOURCES := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*) setup.py CMakeLists.txt pyproject.toml

# The demo takes the full installation where there is one, and is content with less.
DEMO := $(if $(wildcard $(VENV)/installed),installed,demo)

.PHONY: demo examples test test-all test-sanitizers bench bench-gpu compile-report docs lint clean
