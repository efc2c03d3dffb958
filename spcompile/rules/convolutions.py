"""Rules of convolutions, pooling and resampling over tokens: alone, in whole patches, or with the neighbours' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from spcompile.call import Call
from spcompile.layout import Layout, Sharded
from spcompile.rules.base import Build, Plan, first_only
from spcompile.rules.pieces import coarser

aten = torch.ops.aten


def convolved(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """Convolutions of tokens in a spatial dim: by themselves, in whole patches, or with the neighbours' rows."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or call.rank(0) != call.rank(1) or lay.dim < 2:
        return None
    dim = lay.dim
    kernel = call.shape(1)[dim]
    stride, dilation = (_of_dim(call.arguments[a], dim, call.rank(0)) for a in ("stride", "dilation"))
    reach = (kernel - 1) * dilation
    paddings = _paddings(call)
    if paddings is None:
        return None
    padding = paddings[dim - 2]
    if call.arguments.get("transposed"):
        return None
    out = coarser(lay, stride, call.degree) if stride > 1 else lay
    if out is None or call.outputs[0][dim] * stride != call.shape(0)[dim]:
        return None
    before, after = padding, max(reach + 1 - stride - padding, 0)
    alone = len(lay.segments) == 1 and lay.outer == 1 and not lay.segments[0].mirrored
    if (before or after) and not (alone and max(before, after) <= lay.local_extent(call.degree)):
        return None

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x, weight, bias, *rest = given.values()
        rest[1] = [0 if d == dim else p for d, p in enumerate(paddings, start=2)]
        op = getattr(aten, call.node.target._schema.name.removeprefix("aten::")).default  # type: ignore[union-attr]
        return b.emit(op, b.halo(x, lay, before, after), weight, bias, *rest)

    return Plan(first_only(lay, call), (out,), build=build if before or after else None)


def _paddings(call: Call) -> list[int] | None:
    """Padding of each spatial dim; None if it is not the same on both sides."""
    rank, given = call.rank(0), call.arguments["padding"]
    if not isinstance(given, str):
        return [_of_dim(given, d, rank) for d in range(2, rank)]
    reach = [(call.shape(1)[d] - 1) * _of_dim(call.arguments["dilation"], d, rank) for d in range(2, rank)]
    if given == "valid":
        return [0 for _ in reach]
    return None if any(r % 2 for r in reach) else [r // 2 for r in reach]


def convolved_back(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """Transposed convolutions that make a patch of every token."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or call.rank(0) != call.rank(1) or lay.dim < 2:
        return None
    stride, padding, more, dilation = (
        _of_dim(call.arguments[a], lay.dim, call.rank(0)) for a in ("stride", "padding", "output_padding", "dilation")
    )
    if (call.shape(1)[lay.dim], padding, more, dilation) != (stride, 0, 0, 1):
        return None
    operands = first_only(lay, call)
    return Plan(operands, (replace(lay, inner=lay.inner * stride).absorb_inner(call.degree),))


def pooled(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """avg_pool and max_pool of whole patches."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or lay.dim < 2:
        return None
    kernel, stride, padding, dilation = (
        _of_dim(call.arguments.get(a) or default, lay.dim, call.rank(0))
        for a, default in (
            ("kernel_size", 1),
            ("stride", call.arguments["kernel_size"]),
            ("padding", 0),
            ("dilation", 1),
        )
    )
    out = coarser(lay, stride, call.degree) if (kernel, padding, dilation) == (stride, 0, 1) else None
    return Plan((lay,), (out,)) if out and call.outputs[0][lay.dim] * stride == call.shape(0)[lay.dim] else None


def enlarged(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """upsample_nearest by 2, 4, ...: every row several times. By others the nearest row is a matter of rounding."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or lay.dim < 2 or call.rank(0) < 3:
        return None
    factor, left = divmod(call.outputs[0][lay.dim], lay.extent)
    scales = call.arguments.get("scale_factors") or [v for a, v in call.arguments.items() if a.startswith("scales")]
    scale = scales[lay.dim - call.rank(0)] if scales else None
    if left or factor & (factor - 1) or scale not in (None, factor):
        return None
    out = replace(lay, inner=lay.inner * factor).absorb_inner(call.degree)
    if call.arguments.get("output_size") is None:
        return Plan((lay,), (out,))
    size = out.local_shape(call.outputs[0], call.degree)[2:]
    return Plan((lay,), (out,), call.arguments | {"output_size": size}, call.node.target)  # type: ignore[arg-type]


def _of_dim(value: Any, dim: int, rank: int) -> int:
    """The entry of a list argument for one spatial dim; the last is for the last dim, and a single one for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values[dim - rank] if len(values) > 1 else values[0]
