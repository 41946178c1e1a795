"""torchair's own cache (`cache_compile`), run from torch_npu's wheel as it is, with GE alone replaced.

Its source is loaded from the newest wheel. What it imports of the rest of torchair is replaced by as much as it calls:
the compiler hands the traced graph back, and what stands for GE's result is kept in this process.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anychip_ascend.torchair import TorchairEngine
from backends import CompileOptions
from tests.support.rows import row
from tests.support.vendor_sources import sources

SIZES = (1, 2, 4)


class Scaled(nn.Module):
    """Means of images by a weight."""

    input_shape = (8, 6, 3)

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor), requires_grad=False)

    def cast(self, dtype: torch.dtype) -> Scaled:
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32).mean(dim=(1, 2, 3)) * self.factor,)


class Option:
    def __init__(self, value: object) -> None:
        self.value = value


class Config:
    """As torchair's CompilerConfig, as far as its cache reads it: options are set by their values."""

    mode: Any

    def __init__(self) -> None:
        self.__dict__["mode"] = Option("max-autotune")
        self.experimental_config = SimpleNamespace(frozen_parameter=False)
        self.post_grad_custom_pre_pass = self.post_grad_custom_post_pass = Option(None)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = Option(value) if isinstance(value, str) else value

    def as_dict(self) -> tuple[dict[str, object], dict[str, object]]:
        return {"mode": self.mode.value}, {"frozen_parameter": self.experimental_config.frozen_parameter}


@dataclass
class Torchair:
    """What the test sees: GE's compilations, each with its options, and what they have made."""

    compiled: list[dict[str, str]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)

    def compiler(self, config: Config) -> Any:
        self.configs.append(config)

        def compile_graph(graph: Any, inputs: object) -> Any:
            def get_code(options: dict[str, str]) -> str:
                self.compiled.append(options)
                self.made.append(graph)
                return f"from torchair.of_this_test import made\nkernel = made({len(self.made) - 1})\n"

            return SimpleNamespace(get_code=get_code)

        return compile_graph

    def run(self, number: int) -> Any:
        def kernel(*arguments: Tensor) -> Any:
            return self.made[number](*arguments)

        return kernel


def module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def compiled_code(text: str) -> ModuleType:
    made = ModuleType("ge_mod")
    exec(compile(text, "<string>", "exec"), vars(made))
    return made


@pytest.fixture
def torchair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torchair]:
    state = Torchair()
    text = dict(sources("torchair").texts())["torchair/inference/_cache_compiler.py"]
    log: Any = logging.getLogger("torchair")
    monkeypatch.setattr(log, "warning_once", log.debug, raising=False)
    gears = ("get_dim_gears", "set_dim_gears", "guard_gears_shape")
    nothing = lambda *_, **__: None  # noqa: E731
    stubs = [
        module("torchair", __path__=[], CompilerConfig=Config),
        module("torchair.configs", __path__=[]),
        module("torchair.configs.compiler_config", CompilerConfig=Config, _check_config_support=nothing),
        module("torchair.core", __path__=[]),
        module("torchair.core.utils", logger=log, _init_debug_logging=nothing),
        module("torchair.inference", __path__=[]),
        module("torchair.inference._gear_utils", **dict.fromkeys(gears, nothing)),
        module("torchair._utils", __path__=[], add_npu_patch=nothing, get_npu_default_decompositions=dict),
        module(
            "torchair._utils.graph_transform_observer",
            wrap_compiler_phase=nothing,
            DebugContext=object,
            dump_fx_safety=nothing,
        ),
        module(
            "torchair.npu_fx_compiler",
            get_compiler=state.compiler,
            _compile_py_code=compiled_code,
            _get_merged_decompositions=lambda *_: {},
            _process_send_recv=nothing,
            _compile_graph_with_aot=lambda graph, compiler, inputs, *_, **__: state_of(graph, inputs),
        ),
        module("torchair.of_this_test", made=state.run),
    ]
    backends: list[Any] = []

    def state_of(graph: Any, inputs: Any) -> Any:
        return backends[-1].fw_compiler(graph, inputs)

    for stub in stubs:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    cache = module("torchair.inference._cache_compiler", __file__="_cache_compiler.py")
    monkeypatch.setitem(sys.modules, cache.__name__, cache)
    exec(compile(text, "_cache_compiler.py", "exec"), vars(cache))
    made = cache.CacheBackend.__init__

    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        backends.append(self)
        made(self, *arguments, **options)

    monkeypatch.setattr(cache.CacheBackend, "__init__", remember)
    sys.modules["torchair.inference"].cache_compile = cache.cache_compile  # type: ignore[attr-defined]
    torch._dynamo.reset()
    yield state
    torch._dynamo.reset()


def pixels(size: int) -> Any:
    return np.random.default_rng(size).integers(0, 256, (size, *Scaled.input_shape), dtype=np.uint8)


def answers(folder: Path, network: Scaled | None = None, key: str = "weights", precision: str = "fp32") -> list[float]:
    """Of a start: the network compiled or read, and what it makes of four images."""
    torch._dynamo.reset()
    options = CompileOptions(cache_dir=folder, key=key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the vendor's.
        executable = TorchairEngine(row(precision)).compile(network or Scaled(), "cpu", precision, SIZES, options)
    found = [float(value) for size in SIZES for value in executable.run(pixels(size))[0]]
    executable.close()
    return found


def expected(factor: float = 2.0) -> list[float]:
    return [float(value) * factor for size in SIZES for value in pixels(size).mean(axis=(1, 2, 3))]


def test_every_size_is_kept_and_the_next_start_compiles_nothing(torchair: Torchair, tmp_path: Path) -> None:
    assert answers(tmp_path) == pytest.approx(expected())
    assert len(torchair.compiled) == len(SIZES)
    kept = sorted(path.parent.name for path in tmp_path.rglob("compiled_module"))
    assert kept == [f"batch_of_{size}" for size in SIZES]
    told = ({"mode": "max-autotune"}, {"frozen_parameter": True})
    assert [each.as_dict() for each in torchair.configs] == [told] * len(SIZES)
    folders = {options["ge.graph_compiler_cache_dir"] for options in torchair.compiled}
    assert len(folders) == len(SIZES), "GE keeps its own result of each"
    assert answers(tmp_path) == pytest.approx(expected())
    assert len(torchair.compiled) == len(SIZES)


def test_other_weights_precisions_and_versions_have_a_folder_of_their_own(
    torchair: Torchair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchair alone they would share one: their layers read alike."""
    answers(tmp_path)
    assert answers(tmp_path, Scaled(3.0), "others") == pytest.approx(expected(3.0))
    answers(tmp_path, precision="bf16")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "8.5"))
    answers(tmp_path)
    assert len(list((tmp_path / "torchair").iterdir())) == 4
    assert len(torchair.compiled) == 4 * len(SIZES)


def test_a_folder_that_others_may_write_to_is_not_used(torchair: Torchair, tmp_path: Path) -> None:
    (tmp_path / "torchair").mkdir()
    (tmp_path / "torchair").chmod(0o777)
    calls: list[Any] = []

    def backend(graph: Any, inputs: object) -> Any:
        calls.append(graph)
        return graph.forward

    vars(sys.modules["torchair"])["get_npu_backend"] = lambda compiler_config: backend
    assert answers(tmp_path) == pytest.approx(expected())
    assert len(calls) == len(SIZES)
    assert list((tmp_path / "torchair").iterdir()) == []
