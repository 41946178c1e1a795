"""The chart, loaded once for a module."""

from __future__ import annotations

import pytest

from tests.support.manifests import CHART


@pytest.fixture(scope="module")
def chart():
    helm = pytest.importorskip(
        "helm_python", reason="helm_python is not installed: make deploy-environment installs it"
    )
    return helm.Chart.load(str(CHART))
