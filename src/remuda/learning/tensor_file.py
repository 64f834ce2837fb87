"""Files in the safetensors format, written in pieces that are views of the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

MAX_HEADER_BYTES = 1 << 22  # the header holds names, dtypes and offsets of tensors
DTYPES = {  # names of dtypes in safetensors
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

Piece = bytes | memoryview  # some consecutive bytes of a file


def safetensors(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the contents of a safetensors file, in pieces that are views of the tensors.

    The function `save` of the safetensors library would copy all tensors twice while it holds the GIL. Hashing and
    writing large pieces releases the GIL, so training continues while a thread writes the file.
    """
    header: dict[str, object] = {}
    pieces: list[Piece] = []
    end = 0
    # Store tensors of large dtypes first, so that all tensors are aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].contiguous()
        pieces.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        start, end = end, end + len(pieces[-1])
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def read_tensors(data: bytes) -> dict[str, Tensor]:
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:
        raise ValueError("the header of its tensors is too large")
    found: dict[str, Tensor] = tensors_from_bytes(data)
    return found
