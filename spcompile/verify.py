"""Stage 7: the rewritten graph against what its layouts promise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from spcompile import ops
from spcompile.errors import UnsupportedGraphError
from spcompile.recognise import adapter_of
from spcompile.report import Report
from spcompile.rewrite import Rewritten
from spcompile.sites import ATTENTION, Site
from spcompile.source import place

aten = torch.ops.aten

NEEDS_STRIDES = {aten.as_strided.default, aten.view.dtype}
"""Ops that read memory rather than dims: right only on the strides of the captured graph."""


def verify(rewritten: Rewritten, captured: fx.Graph, sites: Sequence[Site], degree: int) -> None:
    """Raises `UnsupportedGraphError` unless every value has its layout's local shape and every site was handled."""
    for node, (layout, origin) in rewritten.expected.items():
        value, whole = node.meta["val"], origin.meta["val"]
        want = layout.local_shape(whole.shape, degree)
        if list(value.shape) != want or value.dtype != whole.dtype:
            raise UnsupportedGraphError(
                "SP213",
                f"{place(node)}: `{node.target}` should give {want} {whole.dtype} on each rank, "
                f"and gives {list(value.shape)} {value.dtype}. This is a defect of spcompile; please report it.",
            )
        if node.target in NEEDS_STRIDES and (_memory(node) != _memory(origin) or _reaches_beyond(node)):
            raise UnsupportedGraphError(
                "SP212",
                f"{place(node)}: `{node.target}` reads memory by strides, which sharding changed. "
                "Use view, reshape or slicing instead.",
            )
    _count_sites(rewritten, captured, sites)


def _memory(node: fx.Node) -> list[tuple[object, ...]]:
    """How the operands lie."""
    values = [n.meta["val"] for n in node.all_input_nodes]
    return [(v.shape, v.stride(), v.storage_offset()) for v in values]


def _reaches_beyond(node: fx.Node) -> bool:
    """Does the result lie partly outside of what the operand covers?"""
    return _reach(node.meta["val"]) > max(_reach(n.meta["val"]) for n in node.all_input_nodes)


def _reach(x: Tensor) -> int:
    """One past the last byte of the storage that ``x`` touches."""
    last = int(x.storage_offset()) + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def _count_sites(rewritten: Rewritten, captured: fx.Graph, sites: Sequence[Site]) -> None:
    """Every site is there once. Known attention ops whose call is not plain attention stay, on whole tensors."""
    not_plain = sum(adapter_of(n) is not None for n in captured.nodes)
    kinds = {*ATTENTION, ops.attention._opoverload}
    nodes = rewritten.graph.nodes
    left = sum(n.target in kinds or adapter_of(n) is not None or "handwritten" in n.meta for n in nodes) - not_plain
    if not left == len(rewritten.report.attention) == len(sites):
        raise UnsupportedGraphError(
            "SP213",
            f"{len(sites)} attention calls were captured, {len(rewritten.report.attention)} were handled and {left} "
            "are in the rewritten graph. This is a defect of spcompile; please report it.",
        )


def require_distributed(sites: Sequence[Site], report: Report) -> None:
    """Refuse a graph whose attention all stays on every rank: the user asked for more ranks and would get none."""
    nothing_to_share = all(site.num_query_tokens < 2 for site in sites)
    if nothing_to_share or any(entry.exchange != "replicated" for entry in report.attention):
        return
    reasons = "\n".join(f"  {e.name} ({e.source}): {e.reason}" for e in report.attention)
    raise UnsupportedGraphError(
        "SP210",
        f"none of the attention ({len(sites)} site{'s' * (len(sites) > 1)}) can be distributed:\n{reasons}\n"
        "Use sp=1, or change what the reasons name.",
    )


def require_strict(report: Report) -> None:
    """``strict=True``: no regather and no replicated site."""
    problems = [f"  regather before `{r.op}` ({r.source}): {r.reason}" for r in report.regathers]
    problems += [
        f"  {e.name} ({e.source}) stays replicated: {e.reason}" for e in report.attention if e.exchange == "replicated"
    ]
    if problems:
        raise UnsupportedGraphError(
            "SP211",
            "strict=True, and the graph needs:\n" + "\n".join(problems) + "\nDrop strict to accept that cost.",
        )
