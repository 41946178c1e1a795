"""Certificates for tests, made with openssl."""

from __future__ import annotations

import subprocess

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(folder, name):
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    openssl("req", "-x509", *_KEY, "-days", 2, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate)
    return key, certificate


def issued(folder, name, by, names=("localhost",)):
    """Issue a certificate by an authority for these names, and for loopback's address."""
    key, request, certificate = (folder / f"{name}.{suffix}" for suffix in ("key", "csr", "pem"))
    openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={','.join(f'DNS:{each}' for each in names)},IP:127.0.0.1\n")
    by_whom = ("-CA", by[1], "-CAkey", by[0], "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *by_whom, "-days", 2, "-extfile", extensions, "-out", certificate)
    return key, certificate
