"""Certificates for tests, made with openssl."""

from __future__ import annotations

import subprocess


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(folder, name):
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        2,
        "-subj",
        f"/CN={name}",
        "-keyout",
        key,
        "-out",
        certificate,
    )
    return key, certificate
