"""Settings: precedence, limits, and a table in the docs that agrees with the code."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.config import Settings, unknown_variables
from app.config.values import by_version, memory_of

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documented():
    """Rows of the table: option, variable, default, meaning."""
    rows = re.findall(r"^\| `--(\S+)` \| `(\S+)` \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    return {option: (variable, default, meaning) for option, variable, default, meaning in rows}


def test_every_setting_is_documented_as_it_is():
    expected = {
        name.replace("_", "-"): (f"ANYCHIP_{name.upper()}", f"`{field.default}`", field.description)
        for name, field in Settings.model_fields.items()
    }
    assert documented() == expected


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(elsewhere, monkeypatch):
    assert Settings().port == 8000
    (elsewhere / "anychip.toml").write_text('port = 1\nmodels = ["resnet18", "yolov8n"]\n')
    assert Settings().port == 1
    assert Settings().model_specs == ("resnet18", "yolov8n")
    assert Settings(models='a[=b.onnx?mean=[0,1]&c={"d":[2,3],"e":4},f').model_specs[1:] == ("f",)
    monkeypatch.setenv("ANYCHIP_PORT", "2")
    assert Settings().port == 2
    assert Settings(port=3).port == 3


@pytest.mark.parametrize(
    "given",
    [
        {"port": 70_000},
        {"batch_sizes": "4,2"},
        {"batch_sizes": ""},
        {"batch_sizes": "0,1"},
        {"queue_size": 0},
        {"max_wait_ms": -1},
        {"surprise": 1},
        {"log_level": "verbose"},
        *({"guard_policy": wrong} for wrong in ("on", "0", "0.0", "1.5", "-1", "nan", "")),
        *({"device_memory": wrong} for wrong in ("0", "-1", "much", "inf", "nan", "5XB", "")),
    ],
)
def test_settings_that_make_no_sense_are_refused(given):
    with pytest.raises(ValidationError):
        Settings(**given)


def test_a_misspelt_setting_in_the_environment_is_named():
    """And not refused: Kubernetes puts variables into a pod that are named after services."""
    others = ["PATH", "ANYCHIP_PORT", "anychip_models", "ANYCHIP_KEY", "ANYCHIP_TORCH", "ANYCHIP_TEST_CPU"]
    others += ["ANYCHIP_SERVICE_HOST", "ANYCHIP_PORT_8000_TCP_ADDR"]
    assert unknown_variables([*others, "ANYCHIP_PER_CARD", "Anychip_Prot"]) == ["ANYCHIP_PER_CARD", "Anychip_Prot"]


@pytest.mark.parametrize(
    ("written", "size"),
    [("0.5", 500), ("1", 1000), ("12GB", 12 * 10**9), ("1.5MiB", 3 << 19), ("2000", 2000), ("auto", None)],
)
def test_memory_is_a_share_or_a_size(written, size):
    assert memory_of(Settings(device_memory=written).device_memory, 1000) == size


def test_models_on_demand_are_named_or_all_but_some():
    assert [Settings(models_on_demand="a,b").is_on_demand(name) for name in "abc"] == [True, True, False]
    assert [Settings(models_on_demand="all,-b").is_on_demand(name) for name in "abc"] == [True, False, True]
    assert not Settings().is_on_demand("a")


def test_versions_are_written_behind_their_model():
    assert by_version("dogs=1:95,2:5,cats=2") == {"dogs": {"1": "95", "2": "5"}, "cats": {"2": ""}}
    for wrong in ("1:5", "dogs=", "dogs=:5"):
        with pytest.raises(ValueError, match="names no version"):
            by_version(wrong)
