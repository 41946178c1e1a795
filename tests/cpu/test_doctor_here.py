"""The doctor on this machine: it asks a child whether torch can be imported, so this is no test of the unit room."""

from anychip_tools.doctor import CHECKS, examine
from app.config import Settings


def test_everything_passes_here_and_in_order(tmp_path):
    checks = list(examine(Settings(weights="sample", device="cpu", port=0, cache_dir=tmp_path), skip=("limits",)))
    assert [check.name for check in checks] == [name for name in CHECKS if name != "limits"]
    assert {check.name: check.status for check in checks if check.status != "PASS"} == {}
    assert not any(check.remedy for check in checks)
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
