"""Checkpoints in MLX layout, made by mlx-lm itself: the resident models that streamed ones are compared with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx_lm


def convert(src: Path, dst: Path, **options: Any) -> Path:
    """Run `mlx_lm convert`; give the result the source's tokenizer files, which it would save in a form of its own."""
    mlx_lm.convert(str(src), str(dst), **options)
    for path in dst.glob("*"):
        if path.name not in ("config.json", "model.safetensors.index.json") and path.suffix != ".safetensors":
            path.unlink()
    for path in src.glob("*token*"):
        shutil.copy(path, dst)
    shutil.copy(src / "generation_config.json", dst)
    return dst


def mixed_bits(path: str, module: Any) -> bool | dict[str, Any]:
    """A recipe: experts of layer 1 at 8 bit and of layer 2 with groups of 32, everything else at 4 bit."""
    if not hasattr(module, "to_quantized"):
        return False
    if "layers.1.mlp.switch_mlp" in path:
        return {"bits": 8, "group_size": 64}
    if "layers.2.mlp.switch_mlp" in path:
        return {"bits": 4, "group_size": 32}
    return {"bits": 4, "group_size": 64}
