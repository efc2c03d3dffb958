"""Stage 4: what the Q, K, V and output of each attention site go through.

`plan_site` looks at how q, k, v and the mask lie and says which exchange makes the call exact, how its
operands must lie for it, which kernel computes it, and what it costs. Decided by data flow and by what kernels
declare, never by comparing lengths or names.

All exchanges share one sharding of the sequence (chunk i on rank i), so that sites of one graph may differ.

Shapes: q [..., H, S, D], k [..., G, T, D], v [..., G, T, E]; P ranks on a mesh (ring, kv_gather, ulysses).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from spcompile.call import Call
from spcompile.config import Mesh
from spcompile.errors import Refusal
from spcompile.layout import REPLICATED, Layout, Sharded
from spcompile.ops.heads import HeadShare
from spcompile.ops.kernels import AUTOMATIC, KERNELS, AttentionKernel
from spcompile.ops.mesh import AXES
from spcompile.rules import Plan
from spcompile.sites import Site

NONE: Mesh = (1, 1, 1)
"""No exchange."""

CAPTURED = "captured"
"""In place of a kernel: the attention call stays as the model made it."""


@dataclass(frozen=True)
class Policy:
    """What of the configuration decides about layouts and sites. ``mesh`` is binding; None: choose.

    ``may_draw``: ranks' random generators are compared, so that what is drawn in full is the same on all.
    """

    degree: int
    mesh: Mesh | None = None
    kernel: str = "auto"
    min_tokens: int = 1
    may_draw: bool = True


@dataclass(frozen=True)
class Cost:
    """What one exchange costs one rank at one site. ``sent`` in bytes; ``wasted`` is a share of the work."""

    sent: int
    collectives: int
    wasted: float = 0.0
    flops: float = 0.0
    hidden: int = 0

    LATENCY = 32 * 1024
    """Bytes that could travel in the time that a collective takes to start."""
    FLOPS_PER_BYTE = 500
    """Floating point operations in the time that a byte takes to travel."""

    @property
    def total(self) -> float:
        """Everything in bytes on the wire. Half of what a ring sends while it computes counts as hidden."""
        work = self.wasted * self.flops / self.FLOPS_PER_BYTE
        return self.sent - self.hidden / 2 + self.collectives * self.LATENCY + work


@dataclass(frozen=True)
class SitePlan:
    """How one site is computed.

    ``exchange`` names it for people; ``mesh`` are the degrees it goes through; ``kernel`` is `CAPTURED` where the
    captured call stays as it is, else the kernel that `spcompile.ops.attention` runs on ``block`` (a mesh that
    says which queries this rank holds). ``balance`` asks for a sharding that balances a causal ring. ``refusal``
    is why the site cannot be computed, with the code of its page.
    """

    exchange: str
    plan: Plan
    reason: str
    mesh: Mesh = NONE
    kernel: str = CAPTURED
    block: Mesh = NONE
    cost: Cost = field(default_factory=lambda: Cost(0, 0))
    runner_up: str = ""
    balance: bool = False
    refusal: Refusal | None = None


def plan_site(site: Site, call: Call, layouts: dict[str, Layout], policy: Policy) -> SitePlan:
    """Choose the exchange of one site. ``layouts`` are those of ``q``, ``k`` and ``v``."""
    return _Planner(site, call, layouts, policy).plan()


def describe_mesh(mesh: Mesh) -> str:
    """``ulysses``, ``ring``, ``kv_gather``, or a product such as ``ring=2 x ulysses=4``."""
    used = [(axis, d) for axis, d in zip(AXES, mesh, strict=True) if d > 1]
    return used[0][0] if len(used) == 1 else " x ".join(f"{axis}={d}" for axis, d in used)


@dataclass(frozen=True)
class _Planner:
    site: Site
    call: Call
    layouts: dict[str, Layout]
    policy: Policy

    @property
    def has_heads(self) -> bool:
        return all(len(self.site.shape(name)) > 2 for name in ("q", "k", "v"))

    @property
    def seq(self) -> int:
        return len(self.site.shape("q")) - 2

    def plan(self) -> SitePlan:
        q, k, v = (self.layouts[name] for name in ("q", "k", "v"))
        site = self.site
        if site.num_query_tokens < self.policy.min_tokens:
            few = f"{site.num_query_tokens} query tokens, fewer than min_tokens={self.policy.min_tokens}"
            return self.replicated(few)
        if not any(isinstance(x, Sharded) for x in (q, k, v)):
            alone = site.num_query_tokens < 2
            why = "one query token, nothing to share" if alone else "no tokens of the query can be sharded"
            return self.replicated(why)
        if isinstance(q, Sharded) and q.dim < self.seq:
            return self.batched(q)
        if isinstance(q, Sharded) and q.dim != self.seq:
            return self.replicated("the query's head dim is sharded")
        if site.dropout > 0:
            return self.refused(
                f"dropout_p={site.dropout}: ranks would drop different attention weights. "
                "Call model.eval(), or set dropout_p=0",
                code="SP208",
            )
        if isinstance(q, Sharded) and not isinstance(k, Sharded) and not isinstance(v, Sharded):
            return self.cross(q)
        return self.exchanged()

    # without an exchange

    def replicated(self, reason: str) -> SitePlan:
        plan = Plan(tuple(REPLICATED for _ in self.call.operands), (REPLICATED,))
        return self.with_kernel(SitePlan("replicated", plan, reason), NONE)

    def refused(self, why: str, code: str = "SP209") -> SitePlan:
        plan = Plan(tuple(REPLICATED for _ in self.call.operands), (REPLICATED,))
        return SitePlan("replicated", plan, "", refusal=Refusal(code, why))

    def operands(self, q: Layout, k: Layout, v: Layout, mask: Layout) -> tuple[Layout, ...]:
        """Layouts in operand order."""
        return (q, k, v) if self.site.mask is None else (q, k, v, mask)

    def batched(self, q: Sharded) -> SitePlan:
        """Tokens are folded into the batch (temporal or window attention): each rank has whole sequences."""
        dim, rank = q.dim, len(self.site.shape("q"))
        same = all(len(self.site.shape(x)) == rank and self.site.shape(x)[dim] == q.extent for x in ("k", "v"))
        if not same:
            return self.replicated(f"dim {dim} of the query is sharded and key and value do not have it")
        if self.site.dropout > 0:
            why = f"dropout_p={self.site.dropout}: ranks would draw their own. Call model.eval(), or set dropout_p=0"
            return self.refused(why, code="SP208")
        wanted = self.operands(q=q, k=q, v=q, mask=self.mask_along(q, dim - rank))
        why = "tokens are folded into the batch, every rank has whole sequences"
        return self.with_kernel(SitePlan("local", Plan(wanted, (q,)), why), NONE)

    def mask_along(self, lay: Sharded, dim_from_end: int) -> Layout:
        """The mask's layout if it has the dim (counted from the end), else replicated."""
        if self.site.mask is None:
            return REPLICATED
        shape = self.site.shape("mask")
        if len(shape) >= -dim_from_end and shape[dim_from_end] == lay.extent and lay.extent > 1:
            return lay.at(len(shape) + dim_from_end)
        return REPLICATED

    def cross(self, q: Sharded) -> SitePlan:
        """Each query row attends to all of a context that every rank holds."""
        if self.site.causal and (q.outer, q.inner) != (1, 1):  # places in the sequence must follow from segments
            q = Sharded(self.seq, self.call.new_root((self.call.node, "q"), self.site.num_query_tokens))
        wanted = self.operands(q=q, k=REPLICATED, v=REPLICATED, mask=self.mask_along(q, -2))
        chosen = SitePlan("local", Plan(wanted, (q,)), "every rank holds all keys and values")
        # Causal: which keys a query sees goes by its place in the whole sequence, which `block` gives.
        return self.with_kernel(chosen, (1, self.policy.degree, 1) if self.site.causal else NONE)

    def with_kernel(self, chosen: SitePlan, block: Mesh) -> SitePlan:
        """``chosen`` with the kernel asked for; ``block`` if positions matter."""
        cut = self.site.fixed_lengths and isinstance(chosen.plan.outputs[0], Sharded)
        if self.policy.kernel == "auto" and block == NONE and not cut:
            return chosen
        if not self.has_heads:
            return self.refused("kernels need a head dim, and query, key or value has only two dims")
        skewed = self.site.causal and self.site.shape("q")[-2] != self.site.shape("k")[-2]
        kernel, why = self.kernel(needs_lse=block != NONE or skewed)
        if kernel is None:
            return self.refused(why)
        return replace(chosen, kernel=kernel, block=block)

    # with one

    def exchanged(self) -> SitePlan:
        if not self.has_heads:
            return self.replicated("query, key or value has no head dim")
        layouts = self.sequence_layouts()
        if layouts is None:
            return self.replicated("query, key and value are sharded along different dims")
        q, k = layouts
        meshes = [self.policy.mesh] if self.policy.mesh else _factorisations(self.policy.degree)
        possible: list[SitePlan] = []
        excluded: dict[str, str] = {}
        for mesh in meshes:
            kernel, why = self.kernel_for(mesh)
            if kernel is None:
                excluded[describe_mesh(mesh)] = why
                continue
            balance = self.site.causal and mesh[0] > 1 and not any(s.mirrored for s in q.segments)
            operands = self.operands(q=q, k=k, v=k, mask=REPLICATED)
            possible.append(
                SitePlan(
                    describe_mesh(mesh),
                    Plan(operands, (q,)),
                    "",
                    mesh=mesh,
                    kernel=kernel,
                    block=mesh,
                    cost=self.cost(mesh),
                    balance=balance,
                )
            )
        if not possible:
            return self.refused(self.why_none(excluded))
        return self.cheapest(possible, excluded)

    def sequence_layouts(self) -> tuple[Sharded, Sharded] | None:
        """Layouts of q, and of k and v, along their token dims; what is whole is cut like its partner, or anew."""

        def along(name: str, partner: str | None) -> Sharded | None:
            lay, other = self.layouts[name], self.layouts[partner] if partner else None
            if isinstance(lay, Sharded) and (lay.outer, lay.inner) == (1, 1):
                return lay if lay.dim == self.seq else None
            if isinstance(other, Sharded) and other.dim == self.seq and (other.outer, other.inner) == (1, 1):
                return other
            return Sharded(self.seq, self.call.new_root((self.call.node, name), self.site.shape(name)[self.seq]))

        q, k, v = along("q", None), along("k", "v"), along("v", "k")
        return None if q is None or k is None or v is None else (q, k)

    def cheapest(self, possible: list[SitePlan], excluded: dict[str, str]) -> SitePlan:
        best, *others = sorted(possible, key=lambda p: p.cost.total)
        if self.policy.mesh is not None:
            return replace(best, reason="as asked for" + self.waste(best.cost))
        why = f"cheapest of {len(possible)}" + self.waste(best.cost)
        why += "".join(f"; {name} not possible: {reason}" for name, reason in list(excluded.items())[:1])
        second = f"{others[0].exchange} (+{others[0].cost.total / best.cost.total - 1:.0%})" if others else ""
        return replace(best, reason=why, runner_up=second)

    @staticmethod
    def waste(cost: Cost) -> str:
        return f", {cost.wasted:.0%} of the attention work is on padding heads" if cost.wasted else ""

    def why_none(self, excluded: dict[str, str]) -> str:
        tried = "; ".join(f"{name}: {why}" for name, why in excluded.items())
        if self.policy.mesh is None:
            return f"no exchange over {self.policy.degree} ranks is exact here: {tried}"
        others = [m for m in _factorisations(self.policy.degree) if self.kernel_for(m)[0] is not None]
        fits = " or ".join(", ".join(f"{a}={d}" for a, d in zip(AXES, m, strict=True) if d > 1) for m in others[:4])
        return f"{tried}. Degrees that work here: {fits or 'none'}"

    # kernels

    @cached_property
    def device(self) -> str:
        return self.site.q.meta["val"].device.type

    @property
    def dtype(self) -> torch.dtype:
        return self.site.node.meta["val"].dtype

    def kernel_for(self, mesh: Mesh) -> tuple[str | None, str]:
        """The kernel for an exchange, or None and why there is none."""
        _, _, ulysses = mesh
        q, k = self.site.shape("q"), self.site.shape("k")
        if ulysses > 1 and q[-3] % k[-3]:
            return None, f"{q[-3]} query heads are no multiple of {k[-3]} key heads"
        whole = ulysses == self.policy.degree
        skewed = self.site.causal and q[-2] != k[-2]
        needs_lse = mesh[0] > 1 or (self.site.causal and (not whole or (skewed and self.policy.kernel != "auto")))
        if self.policy.kernel == "auto" and not needs_lse and (whole or not self.site.fixed_lengths):
            return CAPTURED, ""
        return self.kernel(needs_lse)

    def kernel(self, needs_lse: bool) -> tuple[str | None, str]:
        """The kernel asked for, or the first that declares all that the site needs; or None and why."""
        if self.policy.kernel != "auto":
            lacks = self.lacks(KERNELS[self.policy.kernel], needs_lse)
            return (None, f"kernel {self.policy.kernel} {lacks}") if lacks else (self.policy.kernel, "")
        if self.site.only_captured:
            return None, self.site.only_captured
        fitting = [name for name in AUTOMATIC if not self.lacks(KERNELS[name], needs_lse)]
        return (fitting[0], "") if fitting else (None, f"no kernel for {self.dtype} on {self.device}")

    def lacks(self, kernel: AttentionKernel, needs_lse: bool) -> str | None:
        """What the site needs and the kernel does not declare."""
        if self.site.only_captured:
            return f"cannot be used: {self.site.only_captured}"
        site, head_dim, value_dim = self.site, self.site.shape("q")[-1], self.site.shape("v")[-1]
        num_keys = site.shape("k")[-2]
        uneven = not site.causal and num_keys % kernel.keys_multiple != 0
        mask = None if site.mask is None else "bool" if site.mask.meta["val"].dtype == torch.bool else "additive"
        needs = [
            (needs_lse and not kernel.returns_lse, "returns no log-sum-exp"),
            (
                needs_lse and mask == "additive" and not getattr(kernel, "lse_of_bias", False),
                "has a log-sum-exp that loses rows whose keys are all masked by large numbers; kernel='math' does not",
            ),
            (self.device not in kernel.devices, f"does not run on {self.device}"),
            (self.dtype not in kernel.dtypes, f"does not take {self.dtype}"),
            (mask is not None and mask not in kernel.masks, f"takes no {mask} mask"),
            (site.causal and not kernel.causal, "has no causal form"),
            (head_dim not in kernel.head_dims, f"takes head dims in {kernel.head_dims}, not {head_dim}"),
            (value_dim != head_dim and not kernel.any_value_dim, "needs values as wide as queries"),
            (uneven, f"takes keys by {kernel.keys_multiple}, not {num_keys}"),
            (bool(kernel.missing()), str(kernel.missing())),
        ]
        return next((text for lacking, text in needs if lacking), None)

    # cost

    def cost(self, mesh: Mesh) -> Cost:
        """Bytes that one rank sends, collectives, and work on padding heads."""
        ring, gather, ulysses = mesh
        degree, size = self.policy.degree, torch.empty((), dtype=self.dtype).element_size()

        def local(name: str) -> int:
            *lead, tokens, width = self.site.shape(name)
            return math.prod(lead) * -(-tokens // degree) * width * size

        q, k, v = local("q"), local("k"), local("v")
        out = q // self.site.shape("q")[-1] * self.site.shape("v")[-1]
        sent, collectives, wasted, hidden = 0.0, 0, 0.0, 0.0
        if ulysses > 1:
            num_heads, num_kv = self.site.shape("q")[-3], self.site.shape("k")[-3]
            share = HeadShare(num_heads, num_kv, ulysses)
            peers = ulysses - 1
            sent += peers * ((q + out) / num_heads * share.local + (k + v) / num_kv * share.sent)
            k, v = (int(x / num_kv * share.local_kv * ulysses) for x in (k, v))
            collectives, wasted = 2, share.wasted
        if gather > 1:
            sent, collectives = sent + (gather - 1) * (k + v), collectives + 1
        if ring > 1:
            hidden = (ring - 1) * gather * (k + v)
            sent, collectives = sent + hidden, collectives + ring - 1
        flops = 2 * self.site.cost * (1 + self.site.shape("v")[-1] / self.site.shape("q")[-1]) / degree
        return Cost(int(sent), collectives, wasted, flops, int(hidden))


def _factorisations(degree: int) -> list[Mesh]:
    """All meshes of ``degree`` ranks that are worth a look.

    Two ranks: gathering K and V is the default and Ulysses the alternative; one hop of a ring has only one block
    to hide behind. More ranks: Ulysses with a ring or a gather for the rest.
    """
    if degree == 2:
        return [(1, 2, 1), (1, 1, 2)]
    found: list[Mesh] = []
    for ulysses in range(degree, 0, -1):
        rest, left = divmod(degree, ulysses)
        if left == 0:
            found += [(rest, 1, ulysses)] + ([(1, rest, ulysses)] if rest > 1 else [])
    return found
