"""What the machine is, and what it can do at best: memory copied and matrices multiplied."""

import importlib.metadata
import platform

import torch
from bench.gpu.harness import Bench


def run(bench: Bench) -> str:
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy", "transformers", "flashinfer-python", "vllm", "llguidance"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    bench.say(versions=versions, cuda=torch.version.cuda)
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        bench.say(
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            total_bytes=total,
            free_bytes=free,
        )
    size = 2**12 if bench.tiny else 2**32
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    side = 64 if bench.tiny else 8192
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    seconds = bench.seconds({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, rounds=10)
    bandwidth, rate = 2 * size / seconds["copy"], 2 * side**3 / seconds["product"]
    bench.say(copy_bytes_per_second=bandwidth, bf16_operations_per_second=rate, data_sheet=list(bench.roofline()))
    return f"{bandwidth / 1e12:.2f} TB/s copied, {rate / 1e12:.0f} TFLOP/s of bf16 products"
