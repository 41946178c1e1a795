#!/bin/bash
# Fills /opt/anychip, all that an image adds to its base: a virtual environment that sees the base's packages, and the
# scripts that every image starts with. Runs in the build stage of every Dockerfile, from the root of the sources.
#   PYTHON          the base's Python
#   ANYCHIP_TORCH   keep: the base's torch, whose versions become constraints; else what deploy/install.py takes
#   ANYCHIP_EXTRAS  further extras of anychip
set -euo pipefail

# NVIDIA's images pin every package they were built with, among them older ones than ours. What torch needs of them
# (torch*, numpy, triton) deploy/install.py pins; ours go into a folder of their own.
unset PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES PIP_USER
export PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

"${PYTHON:-python3}" deploy/install.py --copy /opt/anychip
mkdir -p /opt/anychip/libexec
install -m 0755 deploy/image/entrypoint.sh deploy/image/healthcheck.py deploy/image/prepare.sh /opt/anychip/libexec/
