"""Pin the base images: ask their registries which digest each tag has, and keep the answers in digests.json.

    python3 deploy/image/digests.py            # asks, writes digests.json; then run deploy/image/dockerfiles.py
    python3 deploy/image/digests.py --check    # asks, says which tags have moved; exit 1 if any has

A tag can be pushed again, a digest cannot: with it a build takes the same base for ever. Without a digest in the table
the Dockerfiles name the tag alone. Owns: asking registries by the OCI distribution API, with their anonymous
tokens.
Must not need credentials: the base for customers (Cambricon), which each builder names, is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.image.dockerfiles import DIGESTS, FLAVOURS

_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
_LIMIT_S = 20


class DigestError(Exception):
    """Failure to get a digest from a registry; the message is one sentence."""


def split(image: str) -> tuple[str, str, str]:
    """Return registry, repository and tag of an image's name, with Docker Hub's defaults."""
    name, _, tag = image.rpartition(":")
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return "registry-1.docker.io", name if slash else f"library/{name}", tag
    return first, rest, tag


def digest_of(image: str, scheme: str = "https") -> str:
    """Ask for the digest that a tag has now. Raises DigestError."""
    registry, repository, tag = split(image)
    address = f"{scheme}://{registry}/v2/{repository}/manifests/{urllib.parse.quote(tag)}"
    headers = {"Accept": _MANIFESTS}
    try:
        try:
            answer = _head(address, headers)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            token = _token(error.headers.get("WWW-Authenticate", ""))
            answer = _head(address, {**headers, "Authorization": f"Bearer {token}"})
    except (OSError, ValueError) as error:
        raise DigestError(f"{registry} does not say which digest {image} has: {error}") from None
    digest = answer.get("Docker-Content-Digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise DigestError(f"{registry} names no digest for {image}")
    return digest


def _head(address: str, headers: Mapping[str, str]) -> Mapping[str, str]:
    request = urllib.request.Request(address, headers=dict(headers), method="HEAD")
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        found: Mapping[str, str] = answer.headers
        return found


def _token(challenge: str) -> str:
    """Get an anonymous token from the address in the registry's challenge (RFC 6750, distribution's authentication)."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if "realm" not in fields:
        raise ValueError("it wants credentials")
    realm = fields.pop("realm")
    with urllib.request.urlopen(f"{realm}?{urllib.parse.urlencode(fields)}", timeout=_LIMIT_S) as answer:
        found = json.load(answer)
    return str(found.get("token") or found["access_token"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Ask registries for the digests of the base images.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a tag has moved")
    check = parser.parse_args().check
    known: dict[str, str] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    found, moved = dict(known), []
    for image in sorted({flavour.base for flavour in FLAVOURS.values() if flavour.base}):
        try:
            found[image] = digest_of(image)
        except DigestError as error:
            print(f"anychip: {error}", file=sys.stderr)
            continue
        if known.get(image) != found[image]:
            moved.append(image)
        print(f"{image} {found[image]}")
    if check:
        sys.exit(f"moved, or not pinned yet: {', '.join(moved)}" if moved else 0)
    bases = {flavour.base for flavour in FLAVOURS.values()}
    kept = {image: digest for image, digest in sorted(found.items()) if image in bases}
    DIGESTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
