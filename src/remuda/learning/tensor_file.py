"""Files of the safetensors format: written in pieces that are views of the tensors, and read whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

MOST_HEADER_BYTES = 1 << 22  # names, kinds and places of tensors
DTYPES = {  # as safetensors calls them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Piece = bytes | memoryview  # of a file


def safetensors(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """A file of that format, in pieces that are views of the tensors.

    Its own library copies everything twice, and nothing else runs in this process meanwhile; hashing and writing of
    large pieces let training go on.
    """
    header: dict[str, Any] = {}
    pieces: list[Piece] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):  # so that all are aligned
        tensor = tensors[name].contiguous()
        pieces.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        start, end = end, end + len(pieces[-1])
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def tensors_of(data: bytes) -> dict[str, Tensor]:
    if int.from_bytes(data[:8], "little") > MOST_HEADER_BYTES:
        raise ValueError("the header of its tensors is too large to be one")
    found: dict[str, Tensor] = tensors_from_bytes(data)
    return found
