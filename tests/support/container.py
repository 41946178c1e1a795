"""Images without a container engine: buildah builds them over a stand-in base; they run in a mount namespace.

Owns: the stand-in for a vendor's base image (a small Debian whose torch is that of this environment, mounted at the
base's place, beside the vendor's own packages), and processes that see an image's files like a container: a read-only
root, one cache, a /dev/shm of 64 MB, another user. Everything lies in one folder that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_process import stop
from tests.support.vendor_sources import wheel

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/anychip-stand-in"
# Packages that the stand-in base takes from this environment.
_TORCH = ("torch", "torchvision")
_VENDOR = "opt/vendor/site-packages"
_SLOW_S = 1500
BASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vendor_bases.json").read_text())
"""Vendors' base images, by their flavour or a name: `packages` of torch's surroundings; `files`; `environment`."""
_NEEDS = {"torch": "triton", "torchvision": "torch", "torch-tensorrt": "torch"}
"""What each of them wants in exactly the version beside it."""
_DTK_WITHOUT_DRIVER = "raise ImportError('libgalaxyhip.so.5: cannot open shared object file')\n"
"""What DTK's torch does where the host's /opt/hyhal is not mounted, as while an image is built."""

# $1 root, $2 cache, $3 vendor's packages; the rest is run in it. /proc and /dev are the machine's, /dev/shm is small.
_ENTER = """
set -e
mount --bind "$1" "$1"
mount --rbind /proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$1/dev/shm"
mount --bind "$2" "$1/cache"
mount --bind "$3" "$1/opt/vendor"
mount -o remount,bind,ro "$1/opt/vendor"
mount -o remount,bind,ro "$1"
root=$1
shift 3
exec chroot --userspec=10001:0 "$root" "$@"
"""


def describe(site: Path, packages: Mapping[str, str]) -> None:
    """Write into a folder of packages what pip reads of these, in the place of what it says of other versions."""
    for name, version in packages.items():
        file = name.replace("-", "_")
        for about in site.glob(f"{file}-*.dist-info"):
            shutil.rmtree(about)
        about = site / f"{file}-{version}.dist-info"
        about.mkdir()
        needed = _NEEDS.get(name, "")
        needs = f"Requires-Dist: {needed}=={packages[needed]}\n" if needed in packages else ""
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


def missing() -> str:
    """Return why images cannot be built here; empty if they can."""
    tools = [tool for tool in ("buildah", "debootstrap", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} is not installed: apt-get install buildah debootstrap util-linux"
    if os.geteuid() != 0:
        return "building an image without a container engine needs root"
    allowed = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if allowed.returncode:
        return "mount namespaces are not allowed here"
    return ""


@dataclass(frozen=True)
class Builder:
    """buildah with its storage in `folder`; `driver` is its storage driver for layers."""

    folder: Path
    driver: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        storage = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.folder)}
        command = ["buildah", *storage, "--storage-driver", self.driver, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_SLOW_S, check=False, env=environment, cwd=self.folder
        )

    def __call__(self, *arguments: str) -> str:
        """Run buildah; return its output. A failure raises AssertionError with its errors."""
        ran = self.run(*arguments)
        assert ran.returncode == 0, f"{' '.join(arguments)}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout

    @property
    def vendor(self) -> Path:
        return self.folder / "vendor"

    def vendor_of(self, flavour: str) -> Path:
        """Return the folder of the packages in a flavour's base: those of the stand-in, then the vendor's own."""
        if flavour not in BASES:
            return self.vendor
        folder = self.folder / f"vendor-{flavour}"
        if not folder.exists():
            shutil.copytree(self.vendor, folder, copy_function=os.link, symlinks=True)
            packages = folder / "site-packages"
            if flavour == "ascend":
                found = wheel("torch-npu")
                assert isinstance(found, Path), found
                shutil.unpack_archive(found, packages, "zip")
            describe(packages, BASES[flavour]["packages"])
            if flavour == "dcu":
                (packages / "torch/__init__.py").unlink()  # A link to this environment's own.
                (packages / "torch/__init__.py").write_text(_DTK_WITHOUT_DRIVER)
        return folder

    def base_of(self, flavour: str) -> str:
        """Return the flavour's base, with the vendor's files: pins that pip heeds, a toolkit."""
        if not (files := BASES.get(flavour, {}).get("files")):
            return BASE
        folder = self.folder / f"base-{flavour}"
        for name, text in files.items():
            (folder / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "root" / name).write_text(text)
        variables = (f"ENV {name}={text}\n" for name, text in BASES[flavour].get("environment", {}).items())
        (folder / "Dockerfile").write_text(f"FROM {BASE}\nCOPY root/ /\n{''.join(variables)}")
        self("bud", "-q", "--pull-never", "-t", f"{BASE}-{flavour}", str(folder))
        return f"{BASE}-{flavour}"

    def make_base(self) -> None:
        """Make the stand-in base. Its python3 must have the version of this Python, whose torch it sees."""
        mirror = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        release, address = next(line.split() for line in mirror if "debian" in line and "-" not in line.split()[0])
        rootfs = self.folder / "rootfs"
        packages = "--include=python3,python3-venv,ca-certificates"
        try:
            _run("debootstrap", "--variant=minbase", packages, release, str(rootfs), address, limit_s=600)
        except (AssertionError, subprocess.TimeoutExpired) as error:  # Its mirror may be slow, or away.
            pytest.skip(f"Debian's packages for the base could not be had: {str(error)[-300:]}")
        shutil.rmtree(rootfs / "var/cache/apt", ignore_errors=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert (rootfs / f"usr/bin/python{version}").exists(), f"the base has no Python {version}"
        # As in vendors' images, torch lies in its own folder, and a .pth file names it to the base's Python.
        (rootfs / "usr/local/lib" / f"python{version}" / "dist-packages").mkdir(parents=True, exist_ok=True)
        (rootfs / "usr/local/lib" / f"python{version}" / "dist-packages" / "vendor.pth").write_text(f"/{_VENDOR}\n")
        (rootfs / "opt/vendor").mkdir(parents=True)
        recipe = self.folder / "Base.Dockerfile"
        recipe.write_text("FROM scratch\nCOPY rootfs/ /\nENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n")
        self("bud", "-q", "-t", BASE, "-f", str(recipe), str(self.folder))
        shutil.rmtree(rootfs)
        self._gather_torch()

    def _gather_torch(self) -> None:
        """Link torch and all it needs to the files of this environment."""
        from deploy.wheelhouse import closure

        packages = self.folder / "vendor" / "site-packages"
        here = Path(sysconfig.get_path("purelib")).resolve()
        for name in closure(list(_TORCH)):
            for file in metadata.files(name) or ():
                source = Path(file.locate()).resolve()
                if ".." in file.parts or source.suffix == ".pyc" or not source.is_file():
                    continue
                target = packages / str(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(source, target)
        assert (packages / "torch").is_dir(), f"no torch in {here}"

    def make_context(self) -> Path:
        """Copy the sources of the checkout, with a wheelhouse, for a build without a network."""
        context = self.folder / "context"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in filter(None, tracked):
            if (ROOT / name).is_file():
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, context / name)
        gather = [sys.executable, str(ROOT / "deploy/wheelhouse.py"), str(context / "wheelhouse")]
        _run(*gather, "--extras", "cpu,grpc", "--without-torch")
        return context

    def build(self, flavour: str, context: Path, *arguments: str) -> str:
        """Build `Dockerfile.<flavour>` over the stand-in, without a network; return the image's name."""
        image = f"localhost/anychip:{flavour}"
        given = {
            "BASE_IMAGE": self.base_of(flavour),
            "TORCH": "keep",
            "PYTHON": "python3",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "/src/wheelhouse",
        }
        options = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
        mounts = ["-v", f"{self.vendor_of(flavour)}:/opt/vendor:ro"]
        self(
            *("bud", "-q", "--pull-never", "--format", "docker", "--network", "none", *mounts, *options, *arguments),
            *("-t", image, "-f", str(context / f"Dockerfile.{flavour}"), str(context)),
        )
        return image

    def config(self, image: str) -> dict[str, object]:
        """Return the image's configuration: user, environment, entry, volumes, …"""
        found: dict[str, object] = json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]
        return found


@contextlib.contextmanager
def builder(folder: Path) -> Iterator[Builder]:
    # With vfs each layer copies all layers below it: it works everywhere, with ten times the bytes.
    made = Builder(folder, "overlay")
    if made.run("info").returncode:
        shutil.rmtree(folder / "storage", ignore_errors=True)
        made = Builder(folder, "vfs")
    try:
        yield made
    finally:
        for container in made("containers", "-q").split():
            made("rm", container)
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((each for each in points if Path(each).is_relative_to(folder.resolve())), reverse=True):
            subprocess.run(["umount", point], check=True)
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Container:
    """Process that sees the image's files and nothing else, as uid 10001."""

    process: subprocess.Popen[str]
    environment: Mapping[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--root", "--wd"]
        enter += ["--setuid", "10001", "--setgid", "0", "--"]
        return subprocess.run(
            [*enter, *command], env=dict(self.environment), capture_output=True, text=True, timeout=300, check=False
        )


@contextlib.contextmanager
def container(
    made: Builder, image: str, cache: Path, command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[Container]:
    """Start the image's entry with `command`; remove everything of it afterwards."""
    config = made.config(image)
    name = made("from", "--pull-never", image).strip()
    root = made("mount", name).strip()
    variables = dict(line.split("=", 1) for line in config["Env"])  # type: ignore[attr-defined]
    variables.update(environment)
    entry: list[str] = config["Entrypoint"]  # type: ignore[assignment]
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*enter, root, str(cache), str(made.vendor), *entry, *command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield Container(process, variables)
    finally:
        stop(process)
        assert process.stdout is not None
        process.stdout.close()
        made("umount", name)
        made("rm", name)


def _run(*command: str, limit_s: float = _SLOW_S) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
