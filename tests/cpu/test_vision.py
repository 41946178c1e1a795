"""torchvision's quick import: what is left out is there for whoever asks later."""

import subprocess
import sys

import pytest

_CHECKS = {
    "without torch._dynamo": "import models, sys; assert 'torch._dynamo' not in sys.modules",
    "torch._dynamo is the real one afterwards": (
        "import models, torch, torch._dynamo.utils\n"
        "from torchvision.ops import roi_align\n"
        "asked = roi_align.__globals__['is_compile_supported']\n"
        "assert asked('cpu') == torch._dynamo.utils.is_compile_supported('cpu')\n"
        "assert torch._dynamo.__file__"
    ),
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
