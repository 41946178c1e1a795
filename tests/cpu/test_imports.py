"""What is imported when: --help answers without torch, torchvision's quick import leaves out what can come later."""

import subprocess
import sys
from pathlib import Path

import pytest

from backends.vendors.table import ACCELERATORS

_CHECKS = {
    "without torch._dynamo": "import models.catalog, sys; assert 'torch._dynamo' not in sys.modules",
    "files of our networks are read without it": (
        "import sys\n"
        "from pathlib import Path\n"
        "from models import open_model, parse_spec\n"
        "for name in ('resnet50:sample', 'yolov8n:sample', 'yolo11n:random', 'yolo26n:random'):\n"
        "    open_model(parse_spec(name), Path())\n"
        "assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    ),
    "torch._dynamo is the real one afterwards": (
        "import models.catalog, torch, torch._dynamo.utils\n"
        "from torchvision.ops import roi_align\n"
        "asked = roi_align.__globals__['is_compile_supported']\n"
        "assert asked('cpu') == torch._dynamo.utils.is_compile_supported('cpu')\n"
        "assert torch._dynamo.__file__"
    ),
    "what answers": "import app.main, app.serving.service, app.serving.opening, sys; assert 'torch' not in sys.modules",
    "a torchvision that wants more gets more": (
        "import sys, types, torch\n"
        "class Finder:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'torchvision':\n"
        "            from torch._dynamo.utils import counters\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from models.vision import torchvision\n"
        "assert torchvision.ops.nms\n"
        "import torch._dynamo.utils as utils\n"
        "assert utils.counters is not None"
    ),
}


@pytest.mark.parametrize("check", _CHECKS)
def test_in_a_process_of_its_own(check):
    # The third: its finder fails in the quick import, as a module of another torchvision would.
    subprocess.run([sys.executable, "-c", _CHECKS[check]], check=True, timeout=120)


def test_help_answers_without_torch():
    code = (
        "import sys; from app.cli import main\ntry: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    folder = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def test_the_rows_can_be_read_without_torch() -> None:
    """Set-up does so, where torch is not installed yet."""
    code = (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "spec = importlib.util.spec_from_file_location('rows', 'backends/vendors/table.py')\n"
        "module = sys.modules['rows'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print([row.name for row in module.ACCELERATORS])\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([row.name for row in ACCELERATORS])
