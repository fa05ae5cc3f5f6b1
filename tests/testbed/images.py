"""Builds the project's own images from its Dockerfile, without a Docker engine and without a network inside the build.

Owns the base image, the wheelhouse and the archives. What goes into an image is the Dockerfile's business alone.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import packages
from testbed.cache import build_once, digest
from testbed.progress import Unavailable, say

ROOT = Path(__file__).parent.parent.parent
SUITE = "bookworm"
SUITE_PYTHON = "3.11"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
TARGETS = ("control-plane", "engine")
REPOSITORY = "poolwright.dev/testbed"


@dataclass(frozen=True)
class ProjectImages:
    """Both images of one checkout: what the chart calls repository and tag, and the archives that carry them."""

    tag: str
    folder: Path
    repository: str = REPOSITORY

    def name(self, target: str) -> str:
        return f"{self.repository}/{target}:{self.tag}"

    def archive(self, target: str) -> Path:
        return self.folder / f"{target}.tar"


def project_images() -> ProjectImages:
    """The images of this checkout, built if anything that goes into them has changed."""
    if os.getuid() != 0:
        raise Unavailable(f"building images without Docker needs root; this is user {os.getuid()}")
    packages.ensure(packages.IMAGES)
    base, wheels = base_image(), wheelhouse()
    _compile_operations()
    tag = digest("images 2", base.name, wheels.name, *_context())
    doing = "building the project's images, 2 min the first time"
    return ProjectImages(tag, build_once("images", tag, doing, lambda f: _build(f, tag, base, wheels), kept_versions=1))


def _compile_operations() -> None:
    """The engine's C operations, here: the base image has no compiler, as few have."""
    if shutil.which("cc") is None:
        say("no C compiler: the engine's image computes by PyTorch's operations")
        return
    folder = ROOT / "engine_image" / "poolwright_engine" / "native" / "compiled"
    _run([sys.executable, "-m", "poolwright_engine.native.library", str(folder)])


def base_image() -> Path:
    """The folder with Debian and Python in one archive."""
    doing = f"bootstrapping Debian {SUITE} as base image, 1 min the first time"
    return build_once("base", digest("base 1", SUITE, BASE_PACKAGES, platform.machine()), doing, _bootstrap)


def wheelhouse() -> Path:
    """Every package that the images install: fetched here, where this machine's package index is configured."""
    links = _find_links()
    local = sorted(wheel.name for link in links for wheel in Path(link).glob("torch-*.whl"))
    key = digest("wheels 1", platform.machine(), *local, *sorted((ROOT / "locks").glob("*.txt")))
    doing = "fetching the images' Python packages, 1 min the first time"
    return build_once("wheels", key, doing, lambda folder: _fetch(folder, links), kept_versions=1)


def _bootstrap(folder: Path) -> None:
    tree = folder / "tree"
    # debootstrap mounts in the tree; these mounts are nobody else's.
    _run(
        [
            "unshare",
            "--mount",
            "debootstrap",
            "--variant=minbase",
            f"--include={BASE_PACKAGES}",
            SUITE,
            str(tree),
            *_mirror(),
        ]
    )
    for disposable in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(tree / disposable, ignore_errors=True)
    _run(["tar", "--numeric-owner", "--one-file-system", "-C", str(tree), "-cf", str(folder / "tree.tar"), "."])
    shutil.rmtree(tree)


def _mirror() -> list[str]:
    """Where this machine gets the same release from; nothing where debootstrap's own default will do."""
    for source in sorted(Path("/etc/apt").glob("sources.list*")):
        for path in [source] if source.is_file() else sorted(source.iterdir()):
            text = path.read_text(errors="replace")
            for stanza in text.split("\n\n"):  # deb822
                fields = dict(line.split(":", 1) for line in stanza.splitlines() if ":" in line and line[0] not in "# ")
                if SUITE in fields.get("Suites", "").split():
                    return fields["URIs"].split()[:1]
            for line in text.splitlines():
                words = [word for word in line.split() if not word.startswith(("[", "signed-by", "arch="))]
                if words[:1] == ["deb"] and words[2:3] == [SUITE]:
                    return [words[1]]
    return []


def _find_links() -> list[str]:
    """As `make venv` does: a folder of wheels beside the checkout, and the folders that pip is told of."""
    candidates = [str(ROOT.parent / "shared" / "wheels"), *os.environ.get("PIP_FIND_LINKS", "").split()]
    return [link for link in candidates if Path(link).is_dir()]


def _cpu_torch(links: list[str]) -> Path | None:
    """The CPU build of PyTorch that the lock file allows, where one is at hand."""
    allowed = (ROOT / "locks" / "engine.txt").read_text()
    tag = f"cp{SUITE_PYTHON.replace('.', '')}"
    for link in links:
        for wheel in sorted(Path(link).glob(f"torch-*+cpu-{tag}-*_{platform.machine()}.whl")):
            with wheel.open("rb") as data:
                if hashlib.file_digest(data, "sha256").hexdigest() in allowed:
                    return wheel
    return None


def _fetch(folder: Path, links: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--require-hashes"]
    pip += ["--only-binary=:all:", f"--dest={folder}", *(f"--find-links={link}" for link in links)]
    if f"{sys.version_info.major}.{sys.version_info.minor}" != SUITE_PYTHON:
        pip += [f"--python-version={SUITE_PYTHON}", "--implementation=cp"]
        pip += [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in range(36, 16, -1)]
        pip += [f"--platform=manylinux2014_{platform.machine()}"]
    torch = _cpu_torch(links)
    for name in ("build.txt", "control-plane.txt", "engine.txt", *([] if torch else ["cuda.txt"])):
        lock = ROOT / "locks" / name
        if name == "engine.txt" and torch is not None:
            # Among files that the lock allows pip prefers one whose index states its hash, which a folder does not:
            # asked for PyTorch it would fetch the CUDA build.
            shutil.copy(torch, folder)
            lock = folder / "engine-without-torch.txt"
            lock.write_text(re.sub(r"^torch==.*\n(?:[ \t]+.*\n)*", "", (ROOT / "locks" / name).read_text(), flags=re.M))
        if name == "cuda.txt":
            say("no CPU build of PyTorch is at hand, so the engine's image gets the CUDA libraries, several GB")
        _run([*pip, "-r", str(lock)])


def _has_cpu_torch(wheels: Path) -> bool:
    return any(wheels.glob("torch-*+cpu-*.whl"))


def _context() -> list[str | bytes | Path]:
    """Names and contents of all that the Dockerfile may copy."""
    tops = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    parts: list[str | bytes | Path] = [ROOT / "Dockerfile", ROOT / ".dockerignore"]
    for top in sorted(tops):
        path = ROOT / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                parts += [str(file.relative_to(ROOT)), file]
    return parts


def _build(folder: Path, tag: str, base: Path, wheels: Path) -> None:
    started = time.monotonic()
    base_name = f"{REPOSITORY}/base:{base.name}"
    locks = sorted((ROOT / "locks").glob("*.txt"))
    storage = build_once(
        "layers",
        digest("layers 1", base.name, wheels.name, ROOT / "Dockerfile", *locks),
        "unpacking the base image",
        lambda empty: _import_base(empty, base, base_name),
        kept_versions=1,
    )
    engine_locks = "engine.txt" if _has_cpu_torch(wheels) else "engine.txt cuda.txt"
    for target in TARGETS:
        name = f"{REPOSITORY}/{target}:{tag}"
        _buildah(
            storage,
            *(
                "bud",
                "--isolation=chroot",
                "--layers",
                "--pull-never",
                "--timestamp=0",
                f"--target={target}",
                f"--tag={name}",
            ),
            *(f"--volume={wheels}:/wheels:ro", f"--build-arg=BASE_IMAGE={base_name}"),
            f"--build-arg=BUILD_IMAGE={base_name}",
            *("--build-arg=PIP_ARGS=--no-index --find-links /wheels", f"--build-arg=ENGINE_LOCKS={engine_locks}"),
            f"--file={ROOT / 'Dockerfile'}",
            str(ROOT),
        )
        # This format is the one that buildah never compresses; compressing PyTorch takes longer than all the rest.
        _buildah(storage, "push", name, f"docker-archive:{folder / target}.tar:{name}")
        size_mebibytes = (folder / f"{target}.tar").stat().st_size >> 20
        say(f"built {name} ({size_mebibytes} MiB) after {time.monotonic() - started:.0f} s")


def _import_base(storage: Path, base: Path, name: str) -> None:
    recipe = storage / "Containerfile"
    recipe.write_text('FROM scratch\nADD tree.tar /\nCMD ["python3"]\n')
    _buildah(storage, "bud", "--isolation=chroot", f"--tag={name}", f"--file={recipe}", str(base))


def _buildah(storage: Path, verb: str, *arguments: str) -> None:
    """Runs buildah with its storage in the cache and its mounts in a namespace of their own."""
    driver = "overlay" if _overlays(storage) else "vfs"
    options = [f"--root={storage / 'storage'}", f"--runroot={storage / 'run'}", f"--storage-driver={driver}"]
    # buildah keeps a list of blobs in the machine's folder whatever its root is.
    hide = 'if [ -d /var/lib/containers ]; then mount -t tmpfs testbed /var/lib/containers; fi; exec "$@"'
    _run(["unshare", "--mount", "sh", "-c", hide, "sh", "buildah", *options, verb, *arguments])


def _overlays(storage: Path) -> bool:
    """Whether the cache's file system can carry overlays; without, every layer is a full copy."""
    trial = storage / "trial"
    for part in ("lower", "upper", "work", "merged"):
        (trial / part).mkdir(parents=True, exist_ok=True)
    layers = ",".join(f"{part}dir={trial / part}" for part in ("lower", "upper", "work"))
    mount = ["unshare", "--mount", "mount", "-t", "overlay", "-o", layers, "testbed", str(trial / "merged")]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-3000:]}")
