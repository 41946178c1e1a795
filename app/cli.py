"""The `anychip` command: the options, what is printed and the exit codes. Every error is one plain sentence on stderr.

Modules that need torch are imported inside the commands, so that `--help` answers at once, and a worker process, which
imports this module again, loads nothing before its environment is set.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import logging
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anychip_base.extras import entry_points, version
from anychip_base.interpreter import INTERRUPTED
from app import logs
from app.arguments import CommandError, add_settings, read_settings
from app.config import SECTIONS, Settings, absent, unknown_variables

COMMAND_GROUP = "anychip.commands"
"""Group of entry points for modules with TEXT, EXAMPLE, add_arguments(parser) and run(parsed), named as the command."""
_MOST_USED = (
    *("models", "device", "engine", "precision", "batch_sizes"),
    *("host", "port", "grpc_port", "api_keys_file", "cache_dir"),
)
"""Settings that the help of `serve` and `demo` shows first."""

log = logging.getLogger("anychip")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code, 0 only on success."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser(given[0] if given else "")
    parsed = parser.parse_args(given)
    try:
        return int(parsed.command(parsed) or 0)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(setting.replace("-", "_"), Settings.model_fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ": docs/settings.md names all"
            return _complain(f"there is no setting {setting}{hint}")
        return _complain(f"{setting}: {first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})")
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if not isinstance(error, CommandError | OSError) and not _torch_works():
            return _complain(f"torch cannot be imported here ({error}); anychip doctor says what to do")
        if not isinstance(error, _known_errors()):
            raise
        return _complain(str(error))


def _torch_works() -> bool:
    try:
        import torch  # noqa: F401
    except Exception:  # A vendor's build raises any error.
        return False
    return True


def _known_errors() -> tuple[type[Exception], ...]:
    from app.access.keys import KeysError
    from app.images.header import ImageError
    from app.observability.tracing import TracingError
    from app.precision.probes import CalibrationError
    from app.serving.opening import OpeningError
    from backends import BackendError
    from models import ModelError

    ours = CommandError, CalibrationError, KeysError, OpeningError, TracingError
    return (*ours, BackendError, ModelError, ImageError, OSError)


def _complain(message: str) -> int:
    print(f"anychip: {message}", file=sys.stderr)
    return 1


def _parser(first: str) -> argparse.ArgumentParser:
    """Make the parser of all commands; look for outside ones if `first`, the first argument, is none of ours."""
    parser = argparse.ArgumentParser(
        prog="anychip", description="Classifies and detects in images, on any accelerator PyTorch reaches."
    )
    parser.add_argument("--version", action="version", version=f"anychip {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int | None], text: str, example: str
    ) -> argparse.ArgumentParser:
        added = _added(commands, name, text, example)
        added.set_defaults(command=command)
        return added

    serve = add("serve", _serve, "Serve models over HTTP.", "serve --models resnet50,yolov8n --port 8000")
    text = "Serve the sample weights (a wheel of their own, anychip-samples); needs no network."
    demo = add("demo", _demo, text, "demo --open")
    for command in (serve, demo):
        command.usage = f"{command.prog} [--option value …]"
        add_settings(command.add_argument_group("Most used"), _MOST_USED)
        for section in SECTIONS:
            others = tuple(name for name in section.model_fields if name not in _MOST_USED)
            add_settings(command.add_argument_group(str(section.__doc__)), others)
    demo.add_argument("--open", action="store_true", help="open the page in the desktop's browser once it is ready")

    text = "Every backend: PASS where a small computation came out right, FAIL what is here and broken."
    devices = add("devices", _devices, text, "devices --json")
    devices.add_argument("--json", action="store_true", help="print JSON")
    add_settings(devices, ("simulate", "cache_dir"))

    text = "Let one version of a model answer all of its requests, and back."
    promoting = add("promote", _promote, text, "promote dogs 2")
    promoting.add_argument("model", metavar="MODEL")
    promoting.add_argument("version", metavar="VERSION", help="1 for the model whose name has none")
    text = "address of the service's administration (default: http://127.0.0.1:8002)"
    promoting.add_argument("--url", default="http://127.0.0.1:8002", help=text)
    key = os.environ.get("ANYCHIP_KEY", "")
    promoting.add_argument("--key", default=key, help="API key for it (default: $ANYCHIP_KEY)")

    example = "keys add camera-7 --role infer --file keys.txt"
    actions = _actions(add("keys", _keys_add, "API keys.", example))
    adding = _added(actions, "add", "Make a key, print it once, and append its hash to the file.", example)
    adding.add_argument("name", metavar="NAME", help="what the key is called in the audit")
    adding.add_argument("--role", choices=("infer", "admin"), default="infer", help="what it opens (default: infer)")
    adding.add_argument("--file", type=Path, required=True, metavar="KEYS", help="as given to serve --api-keys-file")

    example = "weights fetch resnet50 yolov8n"
    actions = _actions(add("weights", _weights, "List, fetch, verify and convert weight files.", example))
    listing = _added(actions, "list", "List the official weights that are here.", "weights list")
    listing.add_argument("--json", action="store_true", help="print JSON")
    fetch = _added(actions, "fetch", "Download official weights, or what an address names: hf://ORG/NAME.", example)
    fetch.add_argument("models", nargs="+", metavar="MODEL")
    text = "Check downloaded weights against their published SHA-256."
    check = _added(actions, "verify", text, "weights verify resnet50")
    check.add_argument("models", nargs="*", metavar="MODEL")
    text, example = (
        "Write any checkpoint that can be read as safetensors.",
        "weights convert dogs.pth dogs.safetensors --half",
    )
    convert = _added(actions, "convert", text, example)
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--half", action="store_true", help="in half precision")
    for action in (listing, fetch, check):
        add_settings(action, ("cache_dir", "weights_mirror") if action is fetch else ("cache_dir",))
    if first not in commands.choices:
        outsiders = entry_points(COMMAND_GROUP)
        for entry in outsiders.select(name=first) or outsiders:  # Another command may need a broken package.
            try:
                outside = entry.load()
                example = outside.EXAMPLE.removeprefix("anychip ")
                outside.add_arguments(add(entry.name, outside.run, outside.TEXT, example))
            except Exception as error:  # The code of another package must not end the others' commands.
                print(f"anychip: the command {entry.name} of {entry.value} cannot be used: {error}", file=sys.stderr)
    return parser


def _actions(parser: argparse.ArgumentParser) -> Any:
    return parser.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")


def _added(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"example: anychip {example}", allow_abbrev=False
    )
    return added


def _serve(parsed: argparse.Namespace) -> int:
    settings = read_settings(parsed)
    if missing := list(filter(None, map(absent, settings.model_specs))):
        raise CommandError("\n".join(missing))

    def announce(address: str) -> None:
        print(f"anychip serves {settings.shown_models} at {address}", flush=True)

    return _run_service(settings, announce)


def _demo(parsed: argparse.Namespace) -> int:
    from models.sample import IMAGES

    # Without earlier findings on this machine: every demo answers alike.
    settings = read_settings(parsed, weights="sample", profiles="false")

    def announce(address: str) -> None:
        page = f"{address}/" if settings.playground else f"{address}/docs"
        print(f"Open {page} in a browser, or ask from a terminal:\n")
        for model, prefix in (("resnet50", "classify"), ("yolov8n", "detect")):
            path = min(IMAGES.glob(f"{prefix}*.jpg"))
            path = Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path
            if model in settings.model_specs:
                print(f"  curl -F file=@{path} {address}/v1/models/{model}:predict")
        print(f"\nThe API is described at {address}/docs. Ctrl-C ends the service.", flush=True)
        if parsed.open:
            webbrowser.open(page)

    return _run_service(settings, announce)


def _run_service(settings: Settings, announce: Callable[[str], None]) -> int:
    gc.disable()  # Imports make little garbage, and its collection takes a fifth of their time.
    from app.http.server import run
    from app.main import serve

    gc.enable()
    logs.configure(settings.log_level, settings.log_format)
    for name in unknown_variables(os.environ):
        log.warning("%s is no setting and changes nothing: docs/settings.md names all", name)
    run(serve(settings, announce))
    return 0


def _devices(parsed: argparse.Namespace) -> int:
    from backends import report as checked
    from backends import simulated

    settings = read_settings(parsed)
    simulated.configure(settings.simulate, "", settings.cache_dir.expanduser())
    rows = checked()
    if parsed.json:
        print(json.dumps([vars(row) for row in rows], indent=2, default=str))
    else:
        for row in sorted(rows, key=lambda row: row.here, reverse=True):
            status = "PASS" if row.ok else "FAIL" if row.here else "not here"
            print(f"{status}  {row.device:{18 - len(status)}}{row.vendor:17}{row.detail}")
    return 0 if any(row.ok for row in rows) else 1


def _promote(parsed: argparse.Namespace) -> None:
    import httpx

    headers = {"Authorization": f"Bearer {parsed.key}"} if parsed.key else {}
    where = f"{parsed.url.rstrip('/')}/v2/repository/models/{parsed.model}/traffic"
    try:
        answer = httpx.post(where, json={"shares": {parsed.version: 100}}, headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"nothing answers at {parsed.url}: {error}") from None
    if answer.status_code != 200:
        raise CommandError(f"{parsed.url} refuses (status {answer.status_code}): {logs.printable(answer.text[:300])}")
    print(f"version {parsed.version} answers all requests for {parsed.model}")


def _keys_add(parsed: argparse.Namespace) -> None:
    from app.access import keys

    print(keys.add(parsed.file, parsed.name, parsed.role))


def _weights(parsed: argparse.Namespace) -> int:
    import torch

    from models import publishers as weights

    if parsed.action == "convert":
        weights.convert(parsed.source, parsed.target, torch.float16 if parsed.half else torch.float32)
        print(parsed.target)
        return 0
    settings = read_settings(parsed)
    directory, mirror = settings.weights_dir, settings.weights_mirror
    paths = {name: directory / weights.official_source(name).name for name in weights.PUBLISHED}
    cached = {name: path for name, path in paths.items() if path.is_file()}
    if parsed.action == "fetch":
        from models import fetched, parse_spec
        from models.addresses import is_elsewhere

        logs.say_downloads()
        for name in parsed.models:
            if is_elsewhere(name):
                print(fetched(parse_spec(name), directory, again=True).weights)
                continue
            print(weights.official_file(name, directory, allow_download=True, mirror=mirror))
    elif parsed.action == "verify":
        names = parsed.models or [*cached]
        if not names:
            raise CommandError(f"there is nothing in {directory} to verify; anychip weights fetch MODEL downloads")
        for name in names:
            print(f"{weights.official_file(name, directory, allow_download=False)}: OK")
    elif parsed.json:
        rows = [
            {"architecture": name, "path": path, "size_bytes": path.stat().st_size} for name, path in cached.items()
        ]
        print(json.dumps(rows, indent=2, default=str))
    else:
        for name, path in cached.items():
            print(f"{name:20} {path.stat().st_size / 1e6:8.1f} MB  {path}")
        print(f"{len(cached)} files in {directory}; anychip weights fetch MODEL adds one")
    return 0
