"""Stages 3 and 4, for models that fold tokens into the batch of an attention: which factor of the tokens is cut.

Attention within windows, frames or rows sees a batch of short sequences. Cutting what is folded into that batch (rows
of windows, frames) leaves every rank with whole sequences, and often nothing to send; cutting each sequence, as for
any other attention, does not. Both are inferred for the whole graph, and the one that costs less is taken.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from spcompile.call import Call
from spcompile.errors import UnsupportedGraphError
from spcompile.exchanges import Cost, Policy
from spcompile.infer import Inference, depends_on_compute, infer, is_compute, multiply_adds
from spcompile.layout import REPLICATED, Layout, Segment, Sharded
from spcompile.rules import rule_for
from spcompile.rules.mixing import Contract
from spcompile.rules.pieces import Regroup
from spcompile.sites import Site
from spcompile.switching import switch_sites

aten = torch.ops.aten

MAX_CANDIDATES = 4
"""Factors that are tried besides the sequence."""


@dataclass(frozen=True)
class Factor:
    """A way to cut the batch of a site's query. ``given``: a whole dim of an input: perhaps of samples."""

    site: Site
    layout: Sharded
    given: bool


def infer_cheapest(graph: fx.Graph, sites: Sequence[Site], policy: Policy) -> tuple[Inference, int]:
    """Layouts and plans for every node, and how many sites move the cut (see `switch_sites`).

    Raises `UnsupportedGraphError` where the result could not be exact.
    """
    found = infer(graph, sites, policy)
    switched = switch_sites(graph, sites, found, policy)
    if policy.mesh is not None:  # binding
        return found, switched
    best, least = (found, switched), cost(graph, sites, found, policy)
    for factor in candidates(graph, sites, found, policy):
        try:
            other = infer(graph, sites, policy, first=(factor.site, factor.layout))
        except UnsupportedGraphError:  # this way only: the graph has been inferred in another
            continue
        samples = factor.given and not _mixes(sites, other)
        switched = switch_sites(graph, sites, other, policy)
        total = cost(graph, sites, other, policy)
        if total < least and not samples and _no_worse(other, found):
            best, least = (other, switched), total
    return best


def _no_worse(other: Inference, found: Inference) -> bool:
    """Nothing is refused, and nothing is gathered or computed in full that is not otherwise."""
    in_full, otherwise = ({n for n, p in i.sites.items() if p.exchange == "replicated"} for i in (other, found))
    refused = any(plan.refusal for plan in other.sites.values())
    return in_full <= otherwise and not refused and len(other.regathered) <= len(found.regathered)


def _mixes(sites: Sequence[Site], found: Inference) -> bool:
    """Does anything in the graph mix what is cut? Samples of a batch stay apart to the end."""
    along = any(found.layouts[s.q] != REPLICATED and found.sites[s.node].exchange != "local" for s in sites)
    return along or bool(found.regathered) or any(plan.build is not None for plan in found.plans.values())


def candidates(graph: fx.Graph, sites: Sequence[Site], found: Inference, policy: Policy) -> Iterator[Factor]:
    """Factors of sites that send something, one of each shape."""
    tried: set[tuple[object, ...]] = set()
    computed = depends_on_compute(graph)
    for site in sorted(sites, key=lambda s: -s.cost):
        if not found.sites[site.node].cost.total:
            continue
        for factor in factors(site, computed):
            key = (site.shape("q"), factor.layout)
            if factor.layout.tokens >= policy.degree and key not in tried and len(tried) < MAX_CANDIDATES:
                tried.add(key)
                yield factor


def factors(site: Site, computed: set[fx.Node]) -> list[Factor]:
    """The dims that were folded into dims of the query other than its sequence, without samples and heads.

    ``computed`` are values that depend on the model's inputs: a dim that comes from a parameter is none of tokens.
    """
    found: list[Factor] = []

    def follow(dim: int, start: fx.Node, whole: Sharded, outer: int = 1, inner: int = 1) -> None:
        for value, lay in _back(start, whole, computed):
            all_of_it = lay.tokens == value.meta["val"].shape[lay.dim]
            source, folded = _folded(value, lay.dim) if all_of_it else (value, [])
            for i, before, n, after in folded:
                follow(dim, source, Sharded(i, (Segment(n),)), outer * before, after * inner)
            if folded:
                return
        is_last = lay.dim == value.meta["val"].dim() - 1
        if isinstance(rule_for(value.target), Contract) or (is_last and value.target not in _PIXELS):  # features
            return
        if value in computed and not (all_of_it and lay.dim == 0):
            cut = Sharded(dim, (Segment(lay.tokens),), outer, inner)
            found.append(Factor(site, cut, given=all_of_it and value.op == "placeholder"))

    *batch, _, _ = site.shape("q")
    for dim, extent in enumerate(batch[:-1] or batch):  # the last is of heads, unless it is all there is
        follow(dim, site.q, Sharded(dim, (Segment(extent),)))
    return found


_PIXELS = {getattr(aten, f"conv{n}d").default for n in (1, 2, 3)} | {aten.convolution.default}
"""Ops whose last dim is none of features."""

_APART = 1 << 30
"""More ranks than divide any dim: factors of one that they divide are not told apart any more."""


def _back(node: fx.Node, lay: Sharded, computed: set[fx.Node]) -> Iterator[tuple[fx.Node, Sharded]]:
    """The values that a dim comes through, from ``node`` back, and how it lies there."""
    yield node, lay
    while node.op == "call_function":
        output = 0
        if node.target is operator.getitem:
            node, output = node.args  # type: ignore[assignment]
        rule, call = rule_for(node.target), Call(node, _APART)
        pairs = rule.backward(call, output, lay) if rule else []
        first_only = isinstance(rule, Contract)  # a dim of another factor is made by weights
        behind = [(call.operands[i], before) for i, before in pairs if i == 0 or not first_only]
        if not behind:
            return
        node, lay = next(((n, before) for n, before in behind if n in computed), behind[0])
        yield node, lay


def _folded(value: fx.Node, dim: int) -> tuple[fx.Node, list[tuple[int, int, int, int]]]:
    """What ``value`` is a view of, and the dims of that that make up its ``dim``: (dim, outer, extent, inner) each."""
    if value.op != "call_function" or not isinstance(rule_for(value.target), Regroup):
        return value, []
    source: fx.Node = value.args[0]  # type: ignore[assignment]
    shape, new_shape = source.meta["val"].shape, value.meta["val"].shape
    before, extent = math.prod(new_shape[:dim]), new_shape[dim]
    starts = list(accumulate(shape, lambda a, b: a * b, initial=1))
    inside = [i for i, n in enumerate(shape) if n > 1 and starts[i] >= before and starts[i + 1] <= before * extent]
    if len(inside) < 2 or extent != math.prod(shape[i] for i in inside):
        return source, []
    return source, [(i, starts[i] // before, shape[i], before * extent // starts[i + 1]) for i in inside]


def cost(graph: fx.Graph, sites: Sequence[Site], found: Inference, policy: Policy) -> float:
    """What a step costs a rank, in bytes on the wire: exchanges, gathers, and its share of the work with padding."""
    total = sum(found.sites[s.node].cost.total for s in sites)
    work = sum(2 * s.cost * _share(found.layouts[s.q], policy.degree) for s in sites)
    for node in graph.nodes:
        plan = found.plans.get(node)
        if plan is not None:
            call = Call(node, policy.degree)
            total += sum(_gathered(x, found, need) for x, need in zip(call.operands, plan.operands, strict=True))
            total += Cost.LATENCY if plan.build is not None else 0
        if is_compute(node) and node not in found.sites:
            work += 2 * multiply_adds(node) * _share(found.layouts[node], policy.degree)
    return total + work / Cost.FLOPS_PER_BYTE


def _share(layout: Layout, degree: int) -> float:
    """Of a value's entries, that a rank computes."""
    return layout.local_extent(degree) / max(layout.extent, 1) if isinstance(layout, Sharded) else 1.0


def _gathered(value: fx.Node, found: Inference, need: Layout) -> float:
    """Bytes for a value that is cut, and needed in another way."""
    have = found.layouts[value]
    if not isinstance(have, Sharded) or value in found.whole or have == need or value in found.moves:
        return 0.0
    if isinstance(need, Sharded) and (have.dim, have.outer, have.inner) == (need.dim, need.outer, need.inner):
        return 0.0
    tensor = value.meta["val"]
    return float(tensor.numel() * tensor.element_size() + Cost.LATENCY)
