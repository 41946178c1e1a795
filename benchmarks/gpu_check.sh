#!/bin/sh
# Everything about an accelerator in one run, without a network: `anychip verify` with more batch sizes and more time.
#
#     OUT=results benchmarks/gpu_check.sh [--device cuda] [--sizes 1,2,4,8,16,32,64] ...
set -eu
out=${OUT:-$PWD/gpu_check}
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 PIP_NO_INDEX=1
exec "$python" -m app verify --device cuda --sizes 1,2,4,8,16,32,64 --seconds 2 --budget-s 3600 --out "$out" "$@"
