"""What is imported when: the server and --help answer without torch, and reading our networks takes no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anychip_base.interpreter import python_command
from backends.vendors.table import ACCELERATORS

_CHECKS = {
    "our files are read and foreign ones are tried without torch._dynamo": (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from models import open_model, parse_spec\n"
        "from models.exports import image_trial\n"
        "for name in ('resnet50:sample', 'yolov8n:sample', 'yolo11n:random', 'yolo26n:random'):\n"
        "    open_model(parse_spec(name), Path())\n"
        "assert image_trial.at_first_layer(torch.nn.Conv2d(3, 1, 1), torch.zeros(1, 3, 8, 8)) is not None\n"
        "image_trial.watched(torch.nn.ReLU(), lambda: [torch.zeros(1).relu()])\n"
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
    "help": (
        "import sys\n"
        "from app.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    assert 'torch' not in sys.modules"
    ),
    "a file's operators are torchvision's": (
        "import subprocess, sys, tempfile\n"
        "from pathlib import Path\n"
        "if not sys.argv[1:]:\n"
        "    import torch, torchvision\n"
        "    class Suppressed(torch.nn.Module):\n"
        "        def forward(self, boxes):\n"
        "            return torchvision.ops.nms(boxes, boxes[:, 0], 0.5)\n"
        "    kept = tempfile.TemporaryDirectory()\n"
        "    folder = Path(kept.name)\n"
        "    boxes = torch.rand(4, 4).cumsum(1)\n"
        "    torch.jit.trace(Suppressed(), boxes, check_trace=False).save(str(folder / 'a.ts'))\n"
        "    torch.export.save(torch.export.export(Suppressed(), (boxes,)), folder / 'a.pt2')\n"
        "    program = sys.orig_argv[sys.orig_argv.index('-c') + 1]\n"
        "    for name in ('a.ts', 'a.pt2'):\n"
        "        subprocess.run([sys.executable, '-c', program, str(folder / name)], check=True)\n"
        "    kept.cleanup()\n"
        "else:\n"
        "    from models.exports.networks import load_graph\n"
        "    form = 'script' if sys.argv[1].endswith('.ts') else 'program'\n"
        "    load_graph(sys.argv[1], form)\n"
    ),
    "the rows of vendors, which set-up reads where torch is not installed yet": (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "spec = importlib.util.spec_from_file_location('rows', 'backends/vendors/table.py')\n"
        "module = sys.modules['rows'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"assert len(module.ACCELERATORS) == {len(ACCELERATORS)}"
    ),
}


@pytest.mark.parametrize("check", _CHECKS)
def test_in_a_process_of_its_own(check: str) -> None:
    subprocess.run([sys.executable, "-c", _CHECKS[check]], cwd=Path(__file__).parents[2], check=True, timeout=280)


def test_a_child_keeps_what_vendors_put_on_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CANN's set_env.sh does; and the variable, for Pythons that vendors' compilers start."""
    (tmp_path / "acl_of_a_vendor.py").write_text("name = 'acl'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import acl_of_a_vendor, os; print(acl_of_a_vendor.name, os.environ['PYTHONPATH'])"
    done = subprocess.run(python_command("-c", code), capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == f"acl {tmp_path}\n"
