"""Write the Dockerfiles at the top: their common part is here once, their differences are rows of `FLAVOURS`.

    python3 deploy/image/dockerfiles.py            # writes Dockerfile.cuda, .rocm, .ascend, .mlu, .dcu and .cpu
    python3 deploy/image/dockerfiles.py --check    # says which differ from what would be written; exit 1 if any does

Owns: the form of the images. The scripts beside this file hold the steps inside them. The files keep to features of
every recent builder: no heredocs, no `COPY --link`, no cache mounts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from deploy.install import read_project  # noqa: E402

DIGESTS = Path(__file__).with_name("digests.json")
"""Digests of base images by their names, kept by digests.py."""

URLS = {"url": "homepage", "source": "source", "documentation": "documentation"}
"""OCI's labels of addresses, by the names of pyproject.toml's."""


@dataclass(frozen=True)
class Flavour:
    """Differences of the image for one vendor.

    `base`: by an exact version; empty if each builder has to name one, as no version is public.
    `vendor_environment`: files the entry sources, the first that exists. `skip`: checks of `anychip doctor` that
    cannot pass while the image is built, without a device or the driver's files.
    """

    title: str
    base: str
    about: str
    torch: str = "keep"
    extras: str = "grpc"
    python: str = "python3"
    vendor_environment: str = ""
    environment: tuple[str, ...] = ()
    skip: str = "weights,devices,device-files,libraries,port,limits"


FLAVOURS = {
    "cuda": Flavour(
        title="NVIDIA GPUs",
        base="nvcr.io/nvidia/pytorch:26.05-py3",
        about="NVIDIA's build of torch, with torch_tensorrt. Other bases that have torch: pytorch/pytorch.",
        extras="cuda,grpc",
    ),
    "cuda-slim": Flavour(
        title="NVIDIA GPUs, small",
        base="python:3.12.12-slim-bookworm",
        about="Plain Python with the registry's torch, which brings CUDA's libraries as wheels. Without TensorRT.",
        torch="cuda",
        extras="nvml,grpc",
        # Parts of the driver that NVIDIA's runtime mounts; NVIDIA's own images set these themselves.
        environment=("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ),
    "rocm": Flavour(
        title="AMD GPUs",
        base="rocm/pytorch:rocm10.0_ubuntu24.04_py3.13_pytorch_release_2.13.0",
        about="AMD's build of torch.",
    ),
    "ascend": Flavour(
        title="Huawei Ascend NPUs",
        base="quay.io/ascend/torch-npu:2.12.0-cann9.1.0-910b-ubuntu22.04-py3.12",
        about="CANN with torch_npu, for 910B. Others: the same tag with 310p, a3 or 950 in the place of 910b.",
        vendor_environment="/usr/local/Ascend/cann/set_env.sh:/usr/local/Ascend/ascend-toolkit/set_env.sh",
        # The driver is the host's, mounted; set_env.sh does not look there.
        environment=(
            "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/common"
            ":/usr/local/Ascend/driver/lib64/driver${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}",
            # Folders of the host in which npu-smi may lie, where the chart mounts them.
            "PATH=${PATH}:/opt/host/sbin:/opt/host/bin",
        ),
    ),
    "mlu": Flavour(
        title="Cambricon MLUs",
        base="",
        about="The vendor's image with torch_mlu, from its registry for customers, is to be named, by its version:\n"
        "# --build-arg BASE_IMAGE=…",
        python="/torch/venv3/pytorch/bin/python",
    ),
    "dcu": Flavour(
        title="Hygon DCUs",
        base="harbor.sourcefind.cn:5443/dcu/admin/base/pytorch:2.7.1-ubuntu22.04-dtk26.04-py3.10",
        about="The vendor's build of torch on DTK. It can be imported only where the driver's /opt/hyhal is mounted,\n"
        "# so nothing that imports it runs while this is built.",
        vendor_environment="/opt/dtk/env.sh",
        environment=(
            "LD_LIBRARY_PATH=/opt/hyhal/lib:/opt/dtk/.hyhal/rocm_smi/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}",
        ),
        skip="torch,weights,devices,device-files,libraries,port,limits",
    ),
    "cpu": Flavour(
        title="CPUs",
        base="python:3.12.12-slim-bookworm",
        about="Python without torch: the CPU build is installed. A base that has torch: --build-arg TORCH=keep.",
        torch="cpu",
        extras="cpu,grpc",
    ),
}

_HASHES = """\
# What packages' files must hash to. Empty: whatever the registry has under these versions, for other EXTRAS too.
ARG HASHES=deploy/image/hashes/{}.txt
"""
TEMPLATE = """\
# anychip for {title}. Written by deploy/image/dockerfiles.py: change that, then run it.
# {about}
ARG BASE_IMAGE{base}

# What anychip needs. It changes with pyproject.toml and constraints.txt, and is a layer of its own in the image.
FROM ${{BASE_IMAGE}} AS dependencies
ARG PYTHON={python}
ARG TORCH={torch}
ARG EXTRAS={extras}
{hashes}# pip's own, for mirrors and for builds without a network (docs/deploy.md)
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ARG ANYCHIP_TORCH_INDEX
# hadolint ignore=DL3002
USER 0
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY plugins/ascend/pyproject.toml plugins/ascend/
COPY plugins/grpc/pyproject.toml plugins/grpc/
COPY plugins/hosting/pyproject.toml plugins/hosting/
COPY deploy/install.py deploy/
COPY backends/vendors/drivers.py backends/vendors/table.py backends/vendors/
COPY deploy/image/build.sh deploy/image/{copy_hashes}
# For builds without a network (docs/deploy.md). The folder need not be there: the other file keeps the line valid.
COPY constraints.txt wheelhous[e] wheelhouse/
RUN STEP=dependencies PYTHON="${{PYTHON}}" ANYCHIP_TORCH="${{TORCH}}" ANYCHIP_EXTRAS="${{EXTRAS}}" \\
    {use_hashes}bash deploy/image/build.sh

# anychip itself: a few megabytes, all that an edit of the sources changes.
FROM dependencies AS code
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
COPY . .
RUN STEP=code CODE=/opt/code bash deploy/image/build.sh

FROM ${{BASE_IMAGE}}
ARG BASE_IMAGE
ARG VERSION={version}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="anychip" \\
{published}      org.opencontainers.image.description="Classifies and detects in images, on {title}" \\
      org.opencontainers.image.version="${{VERSION}}" \\
      org.opencontainers.image.revision="${{REVISION}}" \\
      org.opencontainers.image.base.name="${{BASE_IMAGE}}"
USER 0
COPY --from=dependencies /opt/anychip /opt/anychip
COPY --from=code /opt/code /opt/anychip
RUN bash /opt/anychip/libexec/prepare.sh
# One volume holds everything that is written: weights, compiled engines, MIOpen's database, temporary files.
ENV ANYCHIP_HOST=0.0.0.0 \\
    ANYCHIP_PORT=8000 \\
    ANYCHIP_CACHE_DIR=/cache \\
    HOME=/cache/home \\
    TMPDIR=/cache/tmp \\
    PATH=/opt/anychip/bin:${{PATH}} \\
    PYTHONDONTWRITEBYTECODE=1 \\
    PYTHONUNBUFFERED=1 \\
    VENDOR_ENVIRONMENT={vendor_environment}
{environment}USER 10001:0
WORKDIR /cache
RUN ["/opt/anychip/libexec/entrypoint.sh", "doctor", "--skip", "{skip}"]
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["/opt/anychip/libexec/healthcheck.py"]
ENTRYPOINT ["/opt/anychip/libexec/entrypoint.sh"]
CMD ["serve"]
"""


def dockerfile(name: str) -> str:
    """Return the text of `Dockerfile.<name>`."""
    flavour, project = FLAVOURS[name], read_project()
    labels = published(project)
    digest = json.loads(DIGESTS.read_text(encoding="utf-8")).get(flavour.base)
    base = f"{flavour.base}@{digest}" if digest else flavour.base
    base = base and f"={base}"
    hashed = flavour.torch != "keep"
    return TEMPLATE.format(
        hashes=_HASHES.format(name) if hashed else "",
        copy_hashes=f"\nCOPY deploy/image/hashes/{name}.txt deploy/image/hashes/" if hashed else "",
        use_hashes='ANYCHIP_HASHES="${HASHES}" ' if hashed else "",
        **{**vars(flavour), "base": base, "environment": "".join(f"ENV {line}\n" for line in flavour.environment)},
        version=project["version"],
        published="".join(f'      org.opencontainers.image.{each}="{text}" \\\n' for each, text in labels.items()),
    )


def published(project: Mapping[str, Any]) -> dict[str, str]:
    """Return what the owner has decided in pyproject.toml, by the names of OCI's labels; nothing before that."""
    urls = {name.lower(): address for name, address in project.get("urls", {}).items()}
    found = {
        "licenses": project.get("license", ""),
        "authors": ", ".join(" ".join(each.values()) for each in project.get("authors", ())),
        **{label: urls.get(name, "") for label, name in URLS.items()},
    }
    return {label: text for label, text in found.items() if text}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the Dockerfiles at the top.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is not up to date")
    check = parser.parse_args().check
    stale = []
    for name in FLAVOURS:
        path = ROOT / f"Dockerfile.{name}"
        if not path.exists() or path.read_text() != dockerfile(name):
            stale.append(path.name)
            if not check:
                path.write_text(dockerfile(name))
    if check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run python3 deploy/image/dockerfiles.py")


if __name__ == "__main__":
    main()
