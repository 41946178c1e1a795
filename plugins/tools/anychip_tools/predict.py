"""`anychip predict`: answers for images, computed here or by a service, printed or written to a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.options import DEVICE_SETTINGS
from anychip_tools.prediction import files
from app import logs
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings, absent
from app.logs import printable
from app.protocols.options import OPTIONS
from app.telling import say

if TYPE_CHECKING:
    from anychip_tools.prediction.offline import LocalPredictor
    from anychip_tools.prediction.remote import RemotePredictor

TEXT = "Answer for images: some in the terminal, or a hundred thousand."
EXAMPLE = "anychip predict yolov8n images/ --output found.jsonl --save drawn/"
_MORE_SETTINGS = ("engine", "precision", "decoders", "max_image_pixels")
_BATCH_SIZE = 8
_DRAWINGS_WAITING = 16
_SHOWN_EVERY_S = 0.2
_KINDS = {"integer": int, "number": float, "string": str}
_LONG_TEXT, _LONG_LIST = 60, 8
_MANY = 500
"""Least number of images for decoder processes: their import of PyTorch takes as long as some hundred images."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", help="a model's name, or name=architecture:weights; with --url the service's name of it")
    add(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="files, directories, globs in quotes, or @LIST, a file with a path a line (@-: standard input)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write answers there: .jsonl, .csv, .parquet (needs pyarrow), or .json for COCO",
    )
    add("--resume", action="store_true", help="go on with an --output that was not finished")
    add("--overwrite", action="store_true", help="replace an --output that exists")
    add("--save", type=Path, metavar="DIR", help="draw what was found into copies of the images there")
    add("--url", default="", help="ask a running service, e.g. http://127.0.0.1:8000")
    add("--key", default=os.environ.get("ANYCHIP_KEY", ""), help="API key for it (default: $ANYCHIP_KEY)")
    add("--parallel", type=int, default=0, help="requests at a time (default: what keeps it busy)")
    add("--batch-size", type=int, default=_BATCH_SIZE, help="images a batch, without --url (default: 8)")
    for row in OPTIONS:
        option, kind = f"--{row.name.replace('_', '-')}", _KINDS[row.kind]
        add(option, type=kind, choices=row.choices or None, help=f"{row.text} (docs/api.md)")
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, (*DEVICE_SETTINGS, *_MORE_SETTINGS))


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return 1 if an image failed or could not be drawn. Raises CommandError."""
    _check_output(parsed)
    if parsed.batch_size < 1 or parsed.parallel < 0:
        raise CommandError("--batch-size must be at least 1, and --parallel at least 0")
    count = sum(1 for _ in files.find_images(parsed.images)) if "@-" not in parsed.images else None
    if count == 0:
        raise CommandError(f"there are no images in {', '.join(parsed.images)}")
    with _predictor(parsed, count) as predictor:
        return (_write_all if parsed.output else _print_all)(predictor, parsed, count)


def _check_output(parsed: argparse.Namespace) -> None:
    if parsed.output is None:
        if parsed.resume or parsed.overwrite:
            raise CommandError("--resume and --overwrite need an --output")
        return
    files.check_format(parsed.output, parsed.masks)
    journal = _journal_path(parsed.output)
    if parsed.resume and parsed.overwrite:
        raise CommandError("--resume and --overwrite are the opposite of each other")
    for path in {parsed.output, journal}:
        if path.exists() and not (parsed.resume or parsed.overwrite):
            raise CommandError(f"{path} exists: --resume goes on with it, --overwrite replaces it")
    if parsed.resume and parsed.output.exists() and not journal.exists():
        raise CommandError(f"{parsed.output} is finished; --overwrite makes it again")


def _journal_path(output: Path) -> Path:
    return output if output.suffix.lower() == files.LINES else output.with_name(output.name + ".partial.jsonl")


@contextlib.contextmanager
def _predictor(parsed: argparse.Namespace, count: int | None) -> Iterator[LocalPredictor | RemotePredictor]:
    given = {row.name: getattr(parsed, row.name, None) for row in OPTIONS}
    query = {name: value for name, value in given.items() if value is not None}
    if parsed.url:
        from anychip_tools.prediction.remote import RemotePredictor

        yield RemotePredictor(parsed.url, parsed.model, query, parsed.key, parsed.parallel)
        return
    if reason := absent(parsed.model):
        raise CommandError(reason)
    settings: Settings = read_settings(parsed)
    logs.say_downloads()
    say(f"opening {parsed.model}")
    from anychip_tools.prediction.offline import LocalPredictor
    from models import Options, PixelModel, open_model, parse_spec

    spec = parse_spec(parsed.model, settings.weights)
    model = open_model(spec, settings.weights_dir, mirror=settings.weights_mirror, trusted=settings.trust_exported)
    if not isinstance(model, PixelModel):
        raise CommandError(f"{model.name} takes tensors, not images: serve it, and send them to /v2/models")
    batch_size = min(parsed.batch_size, count) if count is not None else parsed.batch_size
    many, saves = count is None or count >= _MANY, parsed.save is not None
    predictor = LocalPredictor(model, settings, Options(**query), batch_size, many=many, keeps_encoded=saves)
    try:
        yield predictor
    finally:
        predictor.close()


def _print_all(predictor: LocalPredictor | RemotePredictor, parsed: argparse.Namespace, count: int | None) -> int:
    answers: dict[str, Any] = {}
    failed = 0
    with _Drawings(parsed.save, announced=True) as drawings:
        for outcome in predictor.outcomes(files.find_images(parsed.images)):
            drawings.add(outcome)
            if outcome.prediction is None:
                failed += 1
                _complain(outcome)
            elif parsed.json:
                answers[outcome.source.path] = outcome.prediction
            else:
                _print_prediction(outcome.source.path, outcome.prediction)
    if parsed.json:
        document = {"model": predictor.model, "weights": predictor.weights, "predictions": answers}
        print(json.dumps(document, indent=2))
    failed += drawings.failed
    if failed and count != 1:
        print(f"anychip: {failed} of {count or 'the'} images failed", file=sys.stderr)
    return 1 if failed else 0


def _write_all(predictor: LocalPredictor | RemotePredictor, parsed: argparse.Namespace, count: int | None) -> int:
    done = failed = 0
    path = _journal_path(parsed.output)
    with (
        files.Journal(path, predictor.model, resume=parsed.resume) as journal,
        report.progress() as progress,
        _Drawings(parsed.save, announced=False) as drawings,
    ):
        left = None if count is None else max(0, count - journal.done)
        task = progress.add_task(predictor.model, total=left)
        shown_s = 0.0
        sources = (each for each in files.find_images(parsed.images) if not journal.holds(each.path))
        for outcome in predictor.outcomes(sources):
            if outcome.prediction is not None and parsed.output.suffix.lower() == files.COCO:
                files.check_boxes(outcome.prediction)
            journal.write(outcome, predictor.weights)
            drawings.add(outcome)
            if outcome.prediction is None:
                failed += 1
                _complain(outcome)
            done += 1
            # Not at every image: the bar's own estimate costs as much as a small image's answer.
            if (now_s := time.monotonic()) - shown_s >= _SHOWN_EVERY_S:
                shown_s = now_s
                speed = progress.tasks[task].speed
                rate = f", {speed:.1f} images/s" if speed else ""
                progress.update(task, completed=done, description=f"{predictor.model}{rate}")
        progress.update(task, completed=done)
        elapsed_s = progress.tasks[task].elapsed or 0.0
    if path != parsed.output:
        if names := files.convert(path, parsed.output):
            print(f"anychip: {parsed.output} has no place for {', '.join(names)}: write .jsonl", file=sys.stderr)
        path.unlink()
    rate = f", {done / elapsed_s:.1f} images/s" if elapsed_s > 0 and done else ""
    print(f"{parsed.output}: {done} images, {failed} failed{rate}", file=sys.stderr)
    return 1 if failed or drawings.failed else 0


class _Drawings(contextlib.AbstractContextManager["_Drawings"]):
    """Threads that draw copies of the images while the work goes on, with a bound on those that wait."""

    def __init__(self, folder: Path | None, *, announced: bool) -> None:
        self._folder = folder
        self._announced = announced
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="draw")
        self._under_way: list[Future[Path]] = []
        self.failed = 0

    def __exit__(self, *_: object) -> None:
        self._wait(0)
        self._threads.shutdown()

    def add(self, outcome: files.FileOutcome) -> None:
        """Draw an outcome if drawings are wanted and the outcome has something to draw."""
        if self._folder is None or outcome.prediction is None or outcome.encoded is None:
            return
        from anychip_tools.prediction.drawing import draw

        target = self._folder / f"{outcome.source.relative}.png"
        self._under_way.append(self._threads.submit(draw, outcome.encoded, outcome.prediction, target))
        self._wait(_DRAWINGS_WAITING)

    def _wait(self, most: int) -> None:
        while len(self._under_way) > most:
            try:
                path = self._under_way.pop(0).result()
            except OSError as error:
                self.failed += 1
                print(f"anychip: cannot draw: {error}", file=sys.stderr)
            else:
                if self._announced:
                    print(printable(f"drawn: {path}"), file=sys.stderr)


def _complain(outcome: files.FileOutcome) -> None:
    print(printable(f"anychip: {outcome.source.path}: {outcome.error}"), file=sys.stderr)


def _print_prediction(path: str, prediction: Any) -> None:
    print(f"{printable(path)} ({prediction['width']} x {prediction['height']})")
    findings = next((prediction[name] for name in ("classes", "detections", "areas") if name in prediction), None)
    if findings is None:
        print(f"  {json.dumps(_shortened(prediction), ensure_ascii=False)}")
        return
    for found in findings:
        where = "  x {x1:.0f}..{x2:.0f}  y {y1:.0f}..{y2:.0f}".format(**found["box"]) if "box" in found else ""
        second = f": {found['classes'][0]['label']}" if found.get("classes") else ""
        print(f"  {found.get('score', found.get('share')):.3f}  {printable(found['label'] + second)}{where}")
    if not findings:
        print("  nothing found")


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) > _LONG_LIST:
        return [*map(_shortened, value[:_LONG_LIST]), f"… {len(value)} in all"]
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]}… {len(value)} characters"
    return value
