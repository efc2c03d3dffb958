"""Stage 4, for models that attend within frames and along them in turn: tokens cut along the other dim.

Where a site's sequence is cut and its batch holds tokens too, its queries, keys and values can be computed from
values that are cut along the batch: each rank then has whole sequences. One all-to-all moves the cut of what they
are computed from (often one normed tensor), and one brings the output home. An exchange would move four tensors.

Only values that nothing but this site reads change their layout, so all else stays as inferred. Alike blocks get alike
answers, each in a walk over its own few nodes.

Source: dynamic sequence parallelism (Zhao et al., 2024, arXiv:2403.10266).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from spcompile.call import Call, tensor_of
from spcompile.exchanges import NONE, Cost, Policy, SitePlan, plan_site
from spcompile.infer import Inference, is_compute, is_random, multiply_adds
from spcompile.layout import REPLICATED, Layout, Segment, Sharded
from spcompile.rules import Plan, rule_for
from spcompile.sites import Site


def switch_sites(graph: fx.Graph, sites: Sequence[Site], found: Inference, policy: Policy) -> int:
    """Give sites whose exchange moves more a switch there and back. Returns how many."""
    if policy.mesh is not None:  # binding
        return 0
    position = {node: i for i, node in enumerate(graph.nodes)}
    switched = [s for s in sites if found.sites[s.node].mesh != NONE and _Planner(s, found, policy, position).apply()]
    return len(switched)


@dataclass(frozen=True)
class _Switch:
    """``moved``: the values whose cut moves, with where to; ``region``: what is computed between them and the site."""

    moved: dict[fx.Node, Sharded]
    region: Sequence[fx.Node]
    cost: Cost


@dataclass(frozen=True)
class _Planner:
    """Plans one site."""

    site: Site
    found: Inference
    policy: Policy
    position: dict[fx.Node, int]

    def apply(self) -> bool:
        """Change ``found`` if a switch is possible and costs less than the exchange."""
        now = self.found.sites[self.site.node]
        home = now.plan.operands[0]
        if home != self.found.layouts[self.site.q]:  # it is gathered first, or cut in another way
            return False
        dims = range(len(self.site.shape("q")) - 3)
        possible = [s for d in dims for s in self.switches(d) if s.cost.total < now.cost.total]
        return any(self.accept(switch, now) for switch in sorted(possible, key=lambda s: s.cost.total))

    # where the cut moves

    def switches(self, dim: int) -> Iterator[_Switch]:
        """From q, k and v back: every set of values through which all that is sharded reaches the site."""
        rows = self.site.shape("q")[dim]
        if rows < self.policy.degree:
            return
        want = Sharded(dim, (Segment(rows),))
        wants: dict[fx.Node, Sharded] = {}
        for x in {self.site.q, self.site.k, self.site.v}:
            shape = x.meta["val"].shape
            if self.is_sharded(x):
                if len(shape) != len(self.site.shape("q")) or shape[dim] != rows:
                    return
                wants[x] = want
        region: dict[fx.Node, None] = {}
        pending = [(-self.position[x], x) for x in wants]
        heapq.heapify(pending)
        while True:
            moved = {n: w for n, w in wants.items() if n not in region}
            if all(self.can_move(n, w) for n, w in moved.items()):
                yield _Switch(moved, sorted(region, key=self.position.__getitem__), self.cost(moved, region, want))
            behind = None
            while pending and behind is None:
                _, node = heapq.heappop(pending)
                behind = self.behind(node, wants, region)
            if behind is None:
                return
            region[node] = None
            for n, w in behind.items():
                if n not in wants:
                    heapq.heappush(pending, (-self.position[n], n))
                wants[n] = w

    def behind(
        self, node: fx.Node, wants: dict[fx.Node, Sharded], region: dict[fx.Node, None]
    ) -> dict[fx.Node, Sharded] | None:
        """The sharded values that ``node`` is computed from, with how they are to be cut; None if it must stay."""
        ours = all(user in region or user is self.site.node for user in node.users)
        if not ours or node in self.found.whole or node in self.found.sites or is_random(node):
            return None
        if node.target is operator.getitem:
            source = node.args[0]
            return None if wants.get(source, wants[node]) != wants[node] else {source: wants[node]}  # type: ignore
        rule = rule_for(node.target)
        if rule is None:
            return None
        call = self.call(node)
        found: dict[fx.Node, Sharded] = {}
        for i, want in rule.backward(call, 0, wants[node]):
            operand = call.operands[i]
            if wants.get(operand, want) != want or found.get(operand, want) != want:
                return None
            if self.is_sharded(operand):
                found[operand] = want
        missing = [n for n in call.operands if self.is_sharded(n) and n not in found]
        return None if missing else found

    def call(self, node: fx.Node) -> Call:
        return Call(node, self.policy.degree)

    def is_sharded(self, node: fx.Node) -> bool:
        layout = self.found.layouts[node]
        return any(isinstance(x, Sharded) for x in (layout if isinstance(layout, tuple) else (layout,)))

    def can_move(self, node: fx.Node, want: Sharded) -> bool:
        if tensor_of(node) is None:
            return False
        return node in self.found.whole or self.found.layouts[node].dim != want.dim

    # what it costs

    def cost(self, moved: dict[fx.Node, Sharded], region: dict[fx.Node, None], away: Sharded) -> Cost:
        """Bytes of the values there and of the output back, and work on rows that are padding."""
        home = self.found.layouts[self.site.node]
        there = {n: w for n, w in moved.items() if n not in self.found.whole}
        sent = sum(self.sent(n, self.found.layouts[n], want) for n, want in there.items())
        sent += self.sent(self.site.node, home, away)
        degree = self.policy.degree
        wasted = 1 - away.extent / (away.local_extent(degree) * degree)
        attention = 2 * self.site.cost * (1 + self.site.shape("v")[-1] / self.site.shape("q")[-1])
        projections = sum(2 * multiply_adds(n) for n in region if is_compute(n))
        return Cost(sent, len(there) + 1, wasted, (attention + projections) / degree)

    def sent(self, node: fx.Node, home: Sharded, away: Sharded) -> int:
        """Bytes that a rank sends to move a value."""
        value = node.meta["val"]
        shape = away.local_shape(home.local_shape(value.shape, self.policy.degree), self.policy.degree)
        return math.prod(shape) * value.element_size() * (self.policy.degree - 1)

    # what then becomes of the region

    def accept(self, switch: _Switch, now: SitePlan) -> bool:
        """Plan the region anew. False if that takes more than the two moves."""
        layouts: dict[fx.Node, Any] = dict(switch.moved)
        plans: dict[fx.Node, Plan] = {}
        for node in switch.region:
            if node.target is operator.getitem:
                source, index = node.args
                layouts[node] = layouts[source][index]  # type: ignore[index]
                continue
            call = self.call(node)
            have = [layouts.get(n, REPLICATED) for n in call.operands]
            plan = rule_for(node.target).forward(call, have)  # type: ignore[union-attr]
            if plan is None or plan.cuts or plan.build is not None or not _as_they_lie(have, plan):
                return False
            plans[node], layouts[node] = plan, plan.layout_of(node.meta["val"])
        named = {name: layouts.get(getattr(self.site, name), REPLICATED) for name in ("q", "k", "v")}
        local = plan_site(self.site, self.call(self.site.node), named, self.policy)
        if local.refusal or local.exchange != "local" or not _as_they_lie(list(named.values()), local.plan):
            return False
        plans[self.site.node] = Plan(local.plan.operands, now.plan.outputs)
        wasted = f", {switch.cost.wasted:.0%} of the work is on padding" if switch.cost.wasted else ""
        self.found.sites[self.site.node] = replace(
            local,
            exchange="switch",
            plan=plans[self.site.node],
            reason=f"cheaper than {now.exchange}: the cut moves to the batch and back" + wasted,
            cost=switch.cost,
            runner_up=f"{now.exchange} (+{now.cost.total / switch.cost.total - 1:.0%})",
        )
        self.found.plans.update(plans)
        self.found.layouts.update({n: layouts[n] for n in switch.region})
        for node, layout in switch.moved.items():
            self.found.moves.setdefault(node, {}).setdefault(layout, self.site.node)
        return True


def _as_they_lie(have: Sequence[Layout], plan: Plan) -> bool:
    """Does the plan take its operands as they are, or cut from a whole?"""
    return all(h in (REPLICATED, need) for h, need in zip(have, plan.operands, strict=False))
