"""The command predict: classes and boxes as text, as JSON, and drawn into copies."""

import json

from PIL import Image

from app.cli import main
from tests.support.photographs import FILES

PHOTO = str(FILES[0])


RANDOM = ("--weights", "random", "--engine", "eager", "--precision", "fp32")


def test_predict_prints_classes(capsys):
    assert main(["predict", "resnet18", PHOTO, "--top-k", "2", *RANDOM]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{PHOTO} (640 x 427)")
    assert len(lines) == 3


def test_predict_prints_json_of_several_images(capsys):
    assert main(["predict", "mine=resnet18:random", PHOTO, str(FILES[1]), "--json", *RANDOM]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["weights"]) == ("mine", "random")
    assert list(answer["predictions"]) == [PHOTO, str(FILES[1])]
    assert len(answer["predictions"][PHOTO]["classes"]) == 5


def test_predict_draws_boxes_into_copies(tmp_path, capsys):
    assert main(["predict", "yolov8n", PHOTO, "--save", str(tmp_path / "new"), "--score-threshold", "0", *RANDOM]) == 0
    with Image.open(tmp_path / "new" / "china.png") as drawn, Image.open(PHOTO) as original:
        assert drawn.size == original.size
        assert drawn.tobytes() != original.tobytes()
    assert "china.png" in capsys.readouterr().err
