"""Stage 4: what the Q, K, V and output of each attention site go through.

`plan_site` looks at how q, k, v and the mask lie and says which exchange makes the call exact, how its
operands must lie for it, and what it costs. Decided by data flow alone, never by comparing lengths.

Shapes: q [..., H, S, D], k [..., G, T, D], v [..., G, T, E]; P ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spcompile.call import Call
from spcompile.layout import REPLICATED, Layout, Sharded
from spcompile.rules import Plan
from spcompile.sites import Site


@dataclass(frozen=True)
class SitePlan:
    """``exchange`` is ``ulysses``, ``local`` or ``replicated``; ``refusal`` is why the site cannot be computed."""

    exchange: str
    plan: Plan
    reason: str
    refusal: str | None = None

    @property
    def distributed(self) -> bool:
        return self.exchange != "replicated"


def plan_site(site: Site, call: Call, layouts: dict[str, Layout], min_tokens: int) -> SitePlan:
    """Choose the exchange of one site. ``layouts`` are those of ``q``, ``k``, ``v`` and, if given, ``mask``."""
    q, k, v = layouts["q"], layouts["k"], layouts["v"]
    seq, batch_dims = len(site.shape("q")) - 2, range(len(site.shape("q")) - 2)
    if site.num_query_tokens < min_tokens:
        return _replicated(call, f"{site.num_query_tokens} query tokens, fewer than min_tokens={min_tokens}")
    if not any(isinstance(x, Sharded) for x in (q, k, v)):
        few = site.num_query_tokens < 2
        return _replicated(
            call, "one query token, nothing to share" if few else "no tokens of the query can be sharded"
        )
    if isinstance(q, Sharded) and q.dim in batch_dims:
        return _batched(site, call, q)
    if isinstance(q, Sharded) and q.dim != seq:
        return _replicated(call, "the query's head dim is sharded")
    context_sharded = isinstance(k, Sharded) or isinstance(v, Sharded)
    if isinstance(q, Sharded) and not context_sharded and not site.causal:
        return _cross(site, call, q)
    if site.dropout > 0:
        return _refused(
            call,
            f"dropout_p={site.dropout}: ranks would drop different attention weights. "
            "Call model.eval(), or set dropout_p=0",
        )
    return _ulysses(site, call, layouts)


def _replicated(call: Call, reason: str) -> SitePlan:
    plan = Plan(tuple(REPLICATED for _ in call.operands), (REPLICATED,))
    return SitePlan("replicated", plan, reason)


def _refused(call: Call, refusal: str) -> SitePlan:
    return SitePlan("replicated", _replicated(call, "").plan, "", refusal)


def _operands(site: Site, call: Call, **wanted: Layout) -> tuple[Layout, ...]:
    """Layouts by operand number from layouts by name (q, k, v, mask)."""
    by_node = {getattr(site, name): lay for name, lay in wanted.items() if getattr(site, name) is not None}
    return tuple(by_node[node] for node in call.operands)


def _batched(site: Site, call: Call, q: Sharded) -> SitePlan:
    """Tokens are folded into the batch (temporal or window attention): each rank has whole sequences."""
    dim, rank = q.dim, len(site.shape("q"))
    same = all(len(site.shape(x)) == rank and site.shape(x)[dim] == q.extent for x in ("k", "v"))
    if not same:
        return _replicated(call, f"dim {dim} of the query is sharded and key and value do not have it")
    if site.dropout > 0:
        return _refused(call, f"dropout_p={site.dropout}: ranks would draw different dropout. Call model.eval()")
    plan = Plan(_operands(site, call, q=q, k=q, v=q, mask=_mask_along(site, q, dim - rank)), (q,))
    return SitePlan("local", plan, "tokens are folded into the batch, every rank has whole sequences")


def _mask_along(site: Site, lay: Sharded, dim_from_end: int) -> Layout:
    """The mask's layout if it has the dim (counted from the end), else replicated."""
    if site.mask is None:
        return REPLICATED
    shape = site.shape("mask")
    if len(shape) >= -dim_from_end and shape[dim_from_end] == lay.extent and lay.extent > 1:
        return lay.at(len(shape) + dim_from_end)
    return REPLICATED


def _cross(site: Site, call: Call, q: Sharded) -> SitePlan:
    """Each query row attends to all of a context that every rank holds."""
    if site.dropout > 0:
        return _refused(call, f"dropout_p={site.dropout}: ranks would draw different dropout. Call model.eval()")
    wanted = _operands(site, call, q=q, k=REPLICATED, v=REPLICATED, mask=_mask_along(site, q, -2))
    return SitePlan("local", Plan(wanted, (q,)), "every rank holds all keys and values")


def _ulysses(site: Site, call: Call, layouts: dict[str, Layout]) -> SitePlan:
    """All-to-all: every rank gets all tokens of some heads."""
    seq = len(site.shape("q")) - 2
    heads = {name: site.shape(x)[-3] for name, x in (("query", "q"), ("key", "k"), ("value", "v"))} if seq else {}
    if not heads:
        return _replicated(call, "q has no head dim")
    uneven = {name: n for name, n in heads.items() if n % call.degree}
    if uneven:
        common = math.gcd(*heads.values())
        fits = [n for n in range(1, common + 1) if common % n == 0]
        found = ", ".join(f"{n} {name} heads" for name, n in uneven.items())
        return _refused(
            call,
            f"Ulysses gives each rank the same number of heads, and {found} do not divide by {call.degree} ranks. "
            f"Degrees that work here: {', '.join(map(str, fits))}",
        )

    def along_sequence(name: str, partner: str | None) -> Sharded | None:
        lay = layouts[name]
        if isinstance(lay, Sharded):
            return lay if lay.dim == seq else None
        other = layouts[partner] if partner else None
        if isinstance(other, Sharded) and other.dim == seq:
            return other
        tokens = site.shape(name)[seq]
        return Sharded(seq, call.new_root((call.node, name), tokens))

    q, k, v = along_sequence("q", None), along_sequence("k", "v"), along_sequence("v", "k")
    if q is None or k is None or v is None:
        return _replicated(call, "query, key and value are sharded along different dims")
    plan = Plan(_operands(site, call, q=q, k=k, v=k if v.borders() != k.borders() else v, mask=REPLICATED), (q,))
    return SitePlan("ulysses", plan, "tokens are sharded, every rank takes a share of the heads")
