"""What an image holds, as CycloneDX: every package once, with what it needs, the same each time.

That validators take it is asserted of the image's (tests/deploy)."""

import datetime
from importlib import metadata

import pytest

from deploy.sbom import document

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


@pytest.fixture(scope="module")
def written():
    return document(metadata.distributions(), NOW)


def test_every_package_is_in_it_with_its_version(written):
    versions = {component["name"]: component["version"] for component in written["components"]}
    for name in ("torch", "fastapi", "prometheus-client"):
        assert versions[name] == metadata.version(name)
    assert len(versions) == len(written["components"])
    torch = next(each for each in written["components"] if each["name"] == "torch")
    assert torch["purl"] == f"pkg:pypi/torch@{metadata.version('torch').replace('+', '%2B')}"


def test_what_a_package_needs_is_named(written):
    needs = {each["ref"].partition("@")[0]: each["dependsOn"] for each in written["dependencies"]}
    assert any(ref.startswith("pkg:pypi/starlette@") for ref in needs["pkg:pypi/fastapi"])
    refs = {each["bom-ref"] for each in written["components"]}
    assert all(ref in refs for each in written["dependencies"] for ref in (each["ref"], *each["dependsOn"]))


def test_the_same_packages_are_the_same_document():
    assert document(metadata.distributions(), NOW) == document(metadata.distributions(), NOW)
