"""Pages of text whose content is known: Chinese, Latin, digits, turned and dense lines."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "every", "station", "master", "reads"),
    *("invoice", "numbers", "aloud", "before", "noon", "Amount", "Total", "Customer", "Delivery", "Reference"),
    *("Berlin", "London", "Account", "Network", "Engine", "Window", "Market", "Journey", "Picture"),
)
CHINESE = (
    "中华人民共和国北京上海广州深圳发票号码购买方名称纳税人识别地址电话开户行及账号货物应税劳务服务规格型号单位数量单价金额"
    "合计收款复核开票日期检测识别图像文字模型加速卡昇腾寒武纪海光并发批量内存增长请求时间学习天地山水风雨春夏秋冬东西南北"
)


@dataclass(frozen=True)
class Page:
    """A page and the lines on it, from the top."""

    name: str
    image: Image.Image
    lines: tuple[str, ...]


@cache
def chinese_font() -> Path | None:
    """Return a font with Chinese characters: ANYCHIP_TEST_FONT, else one of the system's; None without any."""
    named = os.environ.get("ANYCHIP_TEST_FONT")
    if named:
        return Path(named)
    found = sorted(Path("/usr/share/fonts").rglob("*wqy*.tt*")) + sorted(Path("/usr/share/fonts").rglob("*CJK*.tt*"))
    return found[0] if found else None


def font(size: int, chinese: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    file = chinese_font() if chinese else None
    return ImageFont.truetype(str(file), size) if file else ImageFont.load_default(size=size)


def text(kind: str, generator: random.Random, length: int) -> str:
    """Generate a line of a kind: `chinese`, `latin`, `digits`."""
    if kind == "digits":
        return "".join(generator.choice("0123456789") for _ in range(length // 2)) + f".{generator.randrange(100):02}"
    if kind == "chinese":
        return "".join(generator.choice(CHINESE) for _ in range(length // 2))
    words = ""
    while len(words) < length:
        words += (" " if words else "") + generator.choice(WORDS)
    return words


def page(seed: int, kind: str, size: tuple[int, int], count: int, font_size: int, angle: float = 0.0) -> Page:
    """`count` lines of a kind on a page of `size`, turned by `angle` degrees around its middle."""
    generator = random.Random(seed)
    image = Image.new("RGB", size, (250, 249, 245))
    canvas = ImageDraw.Draw(image)
    lines = []
    step = (size[1] - 60) // count
    for number in range(count):
        line = text(kind, generator, generator.randrange(8, 36))
        face = font(font_size, kind == "chinese")
        while canvas.textlength(line, font=face) > size[0] - 120:
            line = line[: len(line) * 3 // 4].rstrip()
        canvas.text((40 + generator.randrange(20), 30 + number * step), line, font=face, fill=(20, 22, 30))
        lines.append(line)
    if angle:
        image = image.rotate(angle, Image.Resampling.BICUBIC, expand=False, fillcolor=(250, 249, 245))
    pixels = np.asarray(image).astype(np.int16)
    noise = np.random.default_rng(seed).integers(-6, 7, pixels.shape)
    return Page(f"{kind}-{seed}", Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)), tuple(lines))


def pages() -> Sequence[Page]:
    """About 220 lines."""
    found = []
    for number, kind in enumerate(("latin", "digits", "chinese")):
        found += [
            page(10 * number, kind, (1280, 960), 14, 36),
            page(10 * number + 1, kind, (960, 1280), 18, 32),
            page(10 * number + 2, kind, (1280, 960), 30, 20),  # Dense.
            page(10 * number + 3, kind, (1000, 900), 9, 40, angle=7.0),
            page(10 * number + 4, kind, (800, 500), 7, 34, angle=-4.0),
        ]
    turned = page(40, "chinese", (1280, 960), 10, 40)
    found.append(Page("upside-down", turned.image.rotate(180), turned.lines))
    sideways = page(41, "chinese", (1280, 960), 8, 40)
    found.append(Page("sideways", sideways.image.rotate(90, expand=True), sideways.lines))
    return found
