#!/usr/bin/env bash
# Sets up .venv and runs the tests; with --peers also those that compare with
# PyTorch and Hugging Face transformers. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=dev
if [ "${1:-}" = --peers ]; then
  extras=dev,gguf,peers
  shift
fi
bash scripts/setup.sh "$extras"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# -rs says how many tests were skipped, and why.
exec .venv/bin/python -m pytest -rs -n auto "$@"
