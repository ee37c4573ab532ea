"""Contract of native/src/mlx_ops_module.cpp. Import mlx.core first."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

def adopt(bytes: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> mx.array:
    """An array over `bytes`, without a copy; `dtype` by its safetensors name. CPU backend only.

    At least 8 readable bytes must lie before the data (the region's header page does).
    """
