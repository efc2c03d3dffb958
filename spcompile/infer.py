"""Stage 3: which values are sharded, along which dim, and how every call is then computed.

1. *Demand*: walk back from a site's query along the rules. A value that depends on real compute and has the
   token dim is wanted sharded; where no rule carries the dim further back, it is sharded right there.
2. *Forward*: apply the rules in graph order. Values nobody wanted (rotary tables, masks, modulation) stay
   replicated until they meet a sharded one, and are sliced there.
3. *Cuts*: where a slice falls inside a segment, or two layouts of the same tokens meet, the missing cut points
   go back to where those tokens began to be sharded, and the forward pass runs again. Cuts only accumulate.

Sites that still have a whole query afterwards are walked from next, costliest first, with all of the same shape.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spcompile.call import Call, bind, tensor_of
from spcompile.errors import UnsupportedGraphError
from spcompile.exchanges import Policy, SitePlan, plan_site
from spcompile.layout import REPLICATED, Layout, Origin, Segment, Sharded, missing_cuts, same_tokens
from spcompile.rules import Plan, Rule, rule_for
from spcompile.rules.pieces import Regroup
from spcompile.sites import ATTENTION, Site, bodies
from spcompile.source import place

aten = torch.ops.aten

COMPUTE = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default, aten.einsum.default, aten.convolution.default, aten.conv1d.default, aten.conv2d.default,
    aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    *ATTENTION,
}  # fmt: skip


def is_compute(node: fx.Node) -> bool:
    """Worth sharding? What reaches a query only through other ops is a cheap side value."""
    if node.target is aten.einsum.default:  # of one operand: a permutation or a sum
        return len(node.args[1]) > 1  # type: ignore[arg-type]
    return node.target in COMPUTE


def multiply_adds(node: fx.Node) -> int:
    """About how many there are in an op of `COMPUTE` that is no attention."""
    call, out = bind(node), node.meta["val"].numel()
    weight = tensor_of(call.get("weight"))
    if weight is not None:  # [out, ...]: all that a result is summed over
        return out * weight.numel() // max(weight.shape[0], 1)
    factors = [call.get("mat1", call.get("batch1")), *node.all_input_nodes]
    first = next((x for x in map(tensor_of, factors) if x is not None and x.dim()), None)
    return out * (first.shape[-1] if first is not None else 1)


@dataclass
class Inference:
    """``layouts``: per node, a layout or one per output. ``plans``: calls that touch a sharded value.

    ``whole`` are the nodes that exist replicated although their layout is sharded (they begin to be sharded).
    ``regathered`` says, per call computed on full tensors although an operand is sharded, why. ``moves`` are values
    that are also needed cut along another dim: per value, each such layout and the site that it is for.
    """

    layouts: dict[fx.Node, Any] = field(default_factory=dict)
    plans: dict[fx.Node, Plan] = field(default_factory=dict)
    sites: dict[fx.Node, SitePlan] = field(default_factory=dict)
    whole: set[fx.Node] = field(default_factory=set)
    regathered: dict[fx.Node, str] = field(default_factory=dict)
    moves: dict[fx.Node, dict[Sharded, fx.Node]] = field(default_factory=dict)


def infer(
    graph: fx.Graph, sites: Sequence[Site], policy: Policy, first: tuple[Site, Sharded] | None = None
) -> Inference:
    """Layouts and plans for every node. Raises `UnsupportedGraphError` where the result could not be exact.

    ``first``: a site whose query is to be cut so, before any other is looked at.
    """
    search = _Search(graph, {s.node: s for s in sites}, policy)
    if first is not None:
        search.want(first[0].q, first[1])
    found = search.settle()
    left = [s for s in sorted(sites, key=lambda s: -s.cost) if s.num_query_tokens >= max(policy.min_tokens, 2)]
    while left := [s for s in left if found.layouts[s.q] == REPLICATED]:
        alike = [s for s in left if s.shape("q") == left[0].shape("q")]
        for site in alike:
            search.want_query(site)
        left = [s for s in left if s not in alike]
        found = search.settle()
    if not policy.may_draw:
        _refuse_random(graph, found)
    return found


class _Search:
    """State that grows until the layouts settle: what is wanted, the cuts of every root, causal balance."""

    def __init__(self, graph: fx.Graph, sites: dict[fx.Node, Site], policy: Policy) -> None:
        self.graph, self.sites, self.policy = graph, sites, policy
        self.balanced = False
        self.wants: dict[fx.Node, Sharded] = {}
        self.cuts: dict[object, set[int]] = {}
        self.computed = depends_on_compute(graph)

    def new_root(self, key: object, tokens: int) -> tuple[Segment, ...]:
        borders = sorted({0, tokens, *self.cuts.get(key, ())})
        pairs = list(itertools.pairwise(borders)) or [(0, 0)]
        segments = [Segment(end - start, Origin(key, start)) for start, end in pairs]
        return tuple(segments) if not self.balanced else tuple(half for s in segments for half in _halves(s))

    def call(self, node: fx.Node) -> Call:
        return Call(node, self.policy.degree, self.new_root)

    # demand

    def want_query(self, site: Site) -> None:
        shape = site.shape("q")
        self.want(site.q, Sharded(len(shape) - 2, (Segment(shape[-2]),)))

    def want(self, node: fx.Node, want: Sharded) -> None:
        """Want ``node`` sharded, and whatever it is computed from along the same dim."""
        pending = [(node, want)]
        while pending:
            node, want = pending.pop()
            if node in self.wants or want.tokens < 2:  # one token is no more work on every rank
                continue
            self.wants[node] = want
            pending += [(n, w) for n, w in self.behind(node, want) if n in self.computed or is_compute(node)]

    def behind(self, node: fx.Node, want: Sharded) -> list[tuple[fx.Node, Sharded]]:
        """The operands of ``node`` that the wanted dim comes from."""
        output = 0
        if node.target is _getitem:
            node, output = node.args  # type: ignore[assignment]
        if node in self.sites:
            site = self.sites[node]
            if site.num_query_tokens < self.policy.min_tokens or want.dim == len(site.shape("q")) - 1:
                return []
            return [(site.q, want)]
        rule = rule_for(node.target)
        if rule is None or is_random(node):
            return []
        call = self.call(node)
        return [(call.operands[i], w) for i, w in rule.backward(call, output, want)]

    # forward

    def settle(self) -> Inference:
        """Run forward until nothing new is asked for."""
        while True:
            before = self.asked
            found = _Forward(self).run()
            if self.asked == before:
                return found

    @property
    def asked(self) -> int:
        return sum(map(len, self.cuts.values())) + self.balanced

    def ask(self, cuts: Sequence[tuple[object, int]]) -> bool:
        """Remember cuts for the next round. False if all are known already and did not help."""
        new = [(root, at) for root, at in cuts if at not in self.cuts.get(root, ())]
        for root, at in new:
            self.cuts.setdefault(root, set()).add(at)
        return bool(new)


class _Forward:
    """One pass over the graph."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.found = Inference()

    def run(self) -> Inference:
        for node in self.search.graph.nodes:
            layout = self.layout(node)
            want = self.search.wants.get(node)
            if want is not None and layout == REPLICATED:
                want = want.absorb_inner(self.search.policy.degree)
                layout = replace(want, segments=self.search.new_root(node, want.tokens)).spread_outer()
                self.found.whole.add(node)
            self.found.layouts[node] = layout
        return self.found

    def layout(self, node: fx.Node) -> Any:
        if node.target is _getitem:
            source, index = node.args
            outer = self.found.layouts[source]  # type: ignore[index]
            return outer[index] if isinstance(outer, tuple) else outer  # type: ignore[index]
        if node.op != "call_function" or node.target is aten.copy_.default:
            return REPLICATED
        call = self.search.call(node)
        layouts = [self.found.layouts[n] for n in call.operands]
        if node in self.search.sites:
            return self.site(call, layouts)
        if node.meta.get("whole"):
            return self.planned(call, _whole(call))
        if not any(isinstance(lay, Sharded) for lay in layouts):
            return REPLICATED
        return self.planned(call, self.plan(call, layouts))

    def site(self, call: Call, layouts: list[Layout]) -> Layout:
        site = self.search.sites[call.node]
        named = {name: self.found.layouts[getattr(site, name)] for name in ("q", "k", "v")}
        chosen = plan_site(site, call, named, self.search.policy)
        self.search.balanced |= chosen.balance
        if chosen.refusal is None and not self.agree(call, chosen.plan, layouts, may_regather=True):
            chosen = SitePlan("replicated", _whole(call), "query, key and value carry different tokens")
        self.found.sites[call.node] = chosen
        layout = self.planned(call, chosen.plan)
        assert isinstance(layout, (Sharded, type(REPLICATED)))
        return layout

    def plan(self, call: Call, layouts: list[Layout]) -> Plan:
        if is_random(call.node):
            return self.regather(call, "it draws random numbers, which every rank does in full and alike")
        rule = rule_for(call.node.target)
        if rule is None:
            return self.regather(call, f"{call.node.target} has no rule")
        plan = rule.forward(call, layouts)
        if plan is None:
            return self.regather(call, _why_not(call, rule, layouts))
        if plan.cuts and not self.search.ask(plan.cuts):
            return self.regather(call, "its borders do not fall on whole tokens of the sharded dim")
        if not self.agree(call, plan, layouts):
            return self.regather(call, "its operands carry different tokens")
        return plan

    def planned(self, call: Call, plan: Plan) -> Any:
        self.found.plans[call.node] = plan
        return plan.layout_of(call.node.meta["val"])

    def regather(self, call: Call, reason: str) -> Plan:
        self.found.regathered[call.node] = reason
        return _whole(call)

    def agree(self, call: Call, plan: Plan, layouts: list[Layout], may_regather: bool = False) -> bool:
        """Do all sharded operands get the plan's cuts? Asks for those that are missing on either side.

        False if an operand lies along the same dim with other cuts and nobody can be asked to change that, or
        carries other tokens, unless it may be regathered and cut again.
        """
        cuts: list[tuple[object, int]] = []
        for have, need in zip(layouts, plan.operands, strict=True):
            if not (isinstance(have, Sharded) and isinstance(need, Sharded)) or have == need:
                continue
            if have.dim != need.dim:
                continue  # regathered and cut along the other dim
            if not same_tokens(have, need):
                if may_regather:
                    continue
                return False
            for lay, other in ((have, need), (need, have)):
                missing = missing_cuts(lay, other.borders())
                if missing is None:
                    return False
                cuts += missing
        return not cuts or self.search.ask(cuts)


def _why_not(call: Call, rule: Rule, layouts: Sequence[Layout]) -> str:
    """Why a call is not computed on chunks."""
    if isinstance(rule, Regroup):
        shape, n = " x ".join(map(str, call.outputs[0])), call.degree
        return f"as {shape} the tokens that {n} ranks share are torn apart; sizes that {n} divides often avoid it"
    return "it mixes entries along the token dim, or reorders it"


def _halves(segment: Segment) -> list[Segment]:
    """Head and tail, the tail mirrored: each rank gets an early and a late chunk, equal work under a causal mask."""
    head, tail = segment.split(-(-segment.tokens // 2))
    return [head, replace(tail, mirrored=True)] if tail.tokens else [head]


def _whole(call: Call) -> Plan:
    return Plan(tuple(REPLICATED for _ in call.operands), tuple(REPLICATED for _ in call.outputs))


_getitem = operator.getitem


def depends_on_compute(graph: fx.Graph) -> set[fx.Node]:
    """Values computed from a floating-point model input (not a parameter), or by an op worth sharding."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = tensor_of(node)
        if node.op == "placeholder" and value is not None:
            tensor_dict = node.meta["dynamo"].meta.get("tensor_dict") or {}
            if value.dtype.is_floating_point and "_dynamo_static_input_type" not in tensor_dict:
                found.add(node)
        elif is_compute(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def is_random(node: fx.Node) -> bool:
    """Does the call draw random numbers? Dropout that drops nothing does not."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(is_random(n) for body in bodies(node) for n in body.graph.nodes)
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target in ATTENTION:
        return False
    if "dropout" in target.__name__:
        p, train = bind(node)["p"], bind(node)["train"]
        return bool(train and p)
    return True


def _refuse_random(graph: fx.Graph, found: Inference) -> None:
    """Refuse random numbers that meet sharded values, when nobody compares the ranks' generators."""
    drawn: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = node if is_random(node) else next((drawn[n] for n in node.all_input_nodes if n in drawn), None)
        if source is None:
            continue
        drawn[node] = source
        plan = found.plans.get(node)
        meets = plan is not None and any(isinstance(x, Sharded) for x in (*plan.operands, *plan.outputs))
        if meets or node in found.whole or node in found.regathered:
            raise UnsupportedGraphError(
                "SP207",
                f"{place(source)}: `{source.target}` draws random numbers that reach sharded tokens, and with "
                "check='off' nobody compares the ranks' generators. Leave check on, draw them outside the compiled "
                "model and pass them in, or call model.eval().",
            )
