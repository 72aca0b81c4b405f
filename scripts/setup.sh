#!/usr/bin/env bash
# Makes .venv with the system's python3 and installs gqa and the extras named,
# at the versions of requirements.lock.   usage: scripts/setup.sh [EXTRA,...]
set -euo pipefail
cd "$(dirname "$0")/.."
python3 - <<'CHECK'
import sys
if sys.version_info < (3, 11):
  sys.exit('error: python3 is %d.%d; gqa needs 3.11 or newer' % sys.version_info[:2])
CHECK
[ -x .venv/bin/python ] || python3 -m venv .venv
key="$(cat setup.py scripts/requirements.lock | sha256sum) ${1:-}"
if [ "$(cat .venv/gqa-installed 2>/dev/null)" != "$key" ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint scripts/requirements.lock --editable ".${1:+[$1]}"
  echo "$key" >.venv/gqa-installed
fi
