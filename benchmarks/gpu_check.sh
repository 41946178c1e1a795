#!/bin/sh
# Everything about an accelerator in one run, without a network: see benchmarks/gpu_check.py.
#
#     OUT=results benchmarks/gpu_check.sh [--device cuda] [--models resnet50,yolov8n] ...
set -eu
out=${OUT:-$PWD/gpu_check}
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 PIP_NO_INDEX=1
exec "$python" -m benchmarks.gpu_check --out "$out" "$@"
