"""The stub of CANN offers what every torch_npu that set-up may choose wants when it is imported.

What they want was read from the wheels once (tests/support/cann_symbols.py). It says that their libraries load over the
stub; torch_npu itself runs over it in one version alone (tests/simulated/test_stub_drivers.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.install import CANN_PAIRS
from tests.support.cann_symbols import FILE, STUB, offered, wanted
from tests.support.stub_drivers import _CANN_LIBRARIES

DOCUMENT: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
SOURCE = STUB.read_text(encoding="utf-8")
WHEELS = sorted({plugin for _, plugin in CANN_PAIRS.values()})


@pytest.mark.parametrize("version", WHEELS)
def test_the_stub_offers_what_the_wheel_wants(version: str) -> None:
    assert wanted(DOCUMENT, version) - offered(SOURCE) == set()
    assert {f"{name}.so" for name in ("libascendcl", *_CANN_LIBRARIES)} >= set(DOCUMENT["wheels"][version]["needs"])


@pytest.mark.parametrize("version", WHEELS)
def test_nothing_that_a_wheel_wants_is_of_unknown_origin(version: str) -> None:
    assert DOCUMENT["wheels"][version]["unknown"] == []
    assert {"aclInit", "aclrtMalloc", "aclrtMemcpyAsync"} <= wanted(DOCUMENT, version)


def test_what_the_stub_would_lack_is_seen() -> None:
    assert wanted(DOCUMENT, "2.5.1") - offered(SOURCE.replace("UNSUPPORTED(HcclSend)\n", "")) == {"HcclSend"}
    assert "aclrtMalloc" not in offered(SOURCE.replace("API int aclrtMalloc(", "API int aclrtTake("))
    assert {"aclGetRecentErrMsg", "aclAppLog", "aclInit", "aclrtResetDevice"} <= offered(SOURCE)
