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


def issued(folder, name, by, names=("localhost",)):
    """Issue a certificate by an authority for these names, and for loopback's address."""
    key, request, certificate = (folder / f"{name}.{suffix}" for suffix in ("key", "csr", "pem"))
    openssl(
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        key,
        "-out",
        request,
    )
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={','.join(f'DNS:{each}' for each in names)},IP:127.0.0.1\n")
    openssl(
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        by[1],
        "-CAkey",
        by[0],
        "-days",
        2,
        "-extfile",
        extensions,
        "-CAcreateserial",
        "-out",
        certificate,
    )
    return key, certificate
