# Thin names for the commands that CONTRIBUTING.md explains.
.PHONY: check format test test-fast test-slow test-parity test-gpu ci

check:
	uv run ruff format --check
	uv run ruff check
	uv run pyright
	uv run pytest

format:
	uv run ruff format
	uv run ruff check --fix

test:
	uv run pytest

test-fast:
	uv run pytest -m fast

test-slow:
	uv run pytest -m "slow and not parity"

# In an environment of its own: torch stays out of the default one.
test-parity:
	UV_PROJECT_ENVIRONMENT=.venv-parity uv run --extra parity pytest -m parity

test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false uv run --extra cuda \
		pytest -m gpu --require-gpu -n 8 --dist worksteal --tb=short

ci:
	bash .ci/run
