#!/bin/sh
# Everything about an accelerator in one run, without a network: the contract suite where pytest is, `anychip verify` with more
# batch sizes and more time, and JPEGs over HTTP by one service and by several on the card. Ends with what has failed.
#
#     OUT=results benchmarks/gpu_check.sh [--device cuda] [--sizes 1,2,4,8,16,32,64] ...      options of anychip verify
#
# What is missing on a machine without a network is brought as wheels: pip download what `pip install --dry-run .` names, for
# that machine's Python, and there: pip install --no-index --no-deps --target site *.whl; PYTHONPATH=site benchmarks/gpu_check.sh
set -eu
out=${OUT:-$PWD/gpu_check}
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 PIP_NO_INDEX=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
failed=
device=cuda
previous=
for word; do
    [ "$previous" != --device ] || device=$word
    previous=$word
done

if "$python" -c 'import pytest, hypothesis, pytest_asyncio' 2>/dev/null; then
    "$python" - "$out/photographs.npz" <<'END'
import sys
import numpy as np
from PIL import Image
from models.sample import IMAGES
np.savez(sys.argv[1], **{path.stem: np.array(Image.open(path).convert("RGB")) for path in sorted(IMAGES.glob("*.jpg"))[:4]})
END
    DEVICE_UNDER_TEST=tests.support.devices.plain DEVICE_TYPE=${device%%:*} PHOTOGRAPHS=$out/photographs.npz \
        "$python" -m pytest -q -rs -p no:cacheprovider tests/support/device_contract.py || failed="$failed contract"
    rm -f "$out/photographs.npz"
else
    echo "the contract suite is left out: it needs pytest, pytest-asyncio and hypothesis"
fi
"$python" -m app verify --device cuda --sizes 1,2,4,8,16,32,64 --seconds 2 --budget-s 3600 --out "$out" "$@" || failed="$failed verify"
"$python" -m benchmarks.card_load --device "$device" --services 1,2,4 --json "$out/card_load.json" || failed="$failed card_load"
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
