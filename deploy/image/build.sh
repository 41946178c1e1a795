#!/bin/bash
# Fills /opt/anychip, all that an image adds to its base: a virtual environment that sees the base's packages, anychip itself,
# and the scripts that every image starts with. Runs in the build stages of every Dockerfile, from the root of the sources.
#   $1              where; default /opt/anychip
#   STEP            dependencies: all but anychip itself, which needs constraints.txt and each pyproject.toml alone, so that an
#                   edit of the sources changes a small layer; code: anychip, into CODE; default: both
#   CODE            where `code` puts it; default: $1
#   PYTHON          the base's Python
#   ANYCHIP_TORCH   keep: the base's torch, whose versions become constraints; else what deploy/install.py takes
#   ANYCHIP_EXTRAS  further extras of anychip
set -euo pipefail

# NVIDIA's images pin every package they were built with, among them older ones than ours. What torch needs of them
# (torch*, numpy, triton) deploy/install.py pins; ours go into a folder of their own.
unset PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES PIP_USER
export PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

target=${1:-/opt/anychip}
step=${STEP:-both}
if [[ $step != code ]]; then
    "${PYTHON:-python3}" deploy/install.py --copy --dependencies "$target"
    # anychip lies beside the environment, which is told where.
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$target/code" > "$site/anychip.pth"
    # A worker process, which is spawned, imports this file again: then it must not start a second service.
    printf '#!%s/bin/python\nimport sys\n\nfrom anychip_base.command import main\n\nif __name__ == "__main__":\n    sys.exit(main())\n' "$target" > "$target/bin/anychip"
    chmod 0755 "$target/bin/anychip"
fi
if [[ $step != dependencies ]]; then
    code=${CODE:-$target}
    rm -rf "$code/code"
    "$target/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$code/code" \
        . ./plugins/ascend ./plugins/grpc ./plugins/hosting ./plugins/samples
    rm -rf "$code/code/bin"
    mkdir -p "$code/libexec"
    "$target/bin/python" deploy/sbom.py "$code/sbom.cdx.json"
    install -m 0755 deploy/image/entrypoint.sh deploy/image/healthcheck.py deploy/image/prepare.sh "$code/libexec/"
fi
