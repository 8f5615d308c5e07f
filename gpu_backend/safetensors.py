"""Reader of safetensors files: a length, a JSON header with names, types, shapes and offsets, and
the numbers (https://github.com/huggingface/safetensors, format section)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simulator.util.errors import HeadwayError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """All tensors of the *.safetensors files in a folder, read when asked for."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise HeadwayError(f"{folder}: holds no *.safetensors file")
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in files:
            data, header = _header(path)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._places[name] = (path, data, entry)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Give a tensor's shape, None where there is none of that name."""
        if name not in self._places:
            return None
        return tuple(self._places[name][2]["shape"])

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        path, data, entry = self._places[name]
        kind = DTYPES.get(str(entry["dtype"]))
        if kind is None:
            raise HeadwayError(f"{path}: {name}: dtype {entry['dtype']} is none of {[*DTYPES]}")
        first, last = entry["data_offsets"]
        if data + last > path.stat().st_size:
            raise HeadwayError(f"{path}: is cut off: {name} ends beyond the end of the file")
        numbers = np.fromfile(path, np.uint8, last - first, offset=data + first)
        return torch.from_numpy(numbers).view(kind).view(entry["shape"])


def _header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read where the numbers begin, and the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise HeadwayError(f"{path}: is no safetensors file, or is cut off")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise HeadwayError(f"{path}: is no safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise HeadwayError(f"{path}: is no safetensors file: its header is no JSON object")
    return 8 + size, header
