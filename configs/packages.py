"""Optional packages that a configuration can ask for: found without being imported, which would load CUDA.

Part of :mod:`genrec.configs.schema`, from where other packages import it.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

# FBGEMM's HSTU attention is installed by itself as ``hstu``, or as a part of fbgemm_gpu.
CUTLASS_MODULES = ("hstu", "fbgemm_gpu.experimental.hstu")
# In both. A folder named hstu alone says nothing: this repository has one.
_CUTLASS_FILE = "cuda_hstu_attention.py"


@functools.cache
def find_cutlass_module() -> str | None:
    """The name under which FBGEMM's HSTU attention can be imported, None where it is not installed."""
    for name in CUTLASS_MODULES:
        package, *inner = name.split(".")
        spec = importlib.util.find_spec(package)
        folders = () if spec is None else spec.submodule_search_locations or ()
        if any(Path(folder, *inner, _CUTLASS_FILE).is_file() for folder in folders):
            return name
    return None
