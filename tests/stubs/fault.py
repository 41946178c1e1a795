"""A fault while copies are under way: a test for a child of its own, because it leaves a process nobody can use.

PyTorch's and torch_npu's allocators ask the device for the events of copies. When that raises, whatever allocates next
ends the process with a segmentation fault (in NPUEvent::query for torch_npu); so does torch_npu's own exit handler.
"""

from __future__ import annotations

import pytest

from backends import DeviceLostError
from tests.stubs import plugin
from tests.stubs.contract import BACKEND, DEVICES, Classifier, pictures

# Of no known wording, so that the executable must ask whether the device still answers.
UNKNOWN = {"cuda": 801, "npu": 107002}[plugin.DEVICE_TYPE]


def test_a_device_that_no_longer_answers_is_lost_whatever_it_says() -> None:
    executable = BACKEND.load(Classifier(), DEVICES[0], "eager", "fp32", (2,))
    plugin.set_knob("fail", UNKNOWN)
    with pytest.raises(DeviceLostError, match="is lost"):
        executable.run(pictures(Classifier.input_shape))
