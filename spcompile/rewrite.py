"""Stage 5: the graph that every rank runs.

Node by node, each call is emitted on local shapes; `shard` is put where a replicated value meets a sharded one
(once per value and layout), `unshard` where a whole value is needed, and the exchange around each attention
call. The new graph names no rank and no per-rank size: all ranks hold the same text.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing

from spcompile import ops
from spcompile.call import Call, bind, tensor_of
from spcompile.capture import Captured
from spcompile.exchanges import CAPTURED, NONE, SitePlan
from spcompile.infer import Inference, is_compute
from spcompile.layout import REPLICATED, Layout, Segment, Sharded
from spcompile.report import AttentionEntry, ReductionEntry, RegatherEntry, Report
from spcompile.rules import Plan, rule_for
from spcompile.sites import Site
from spcompile.source import module_of, source_of

aten = torch.ops.aten

KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


@dataclass
class Rewritten:
    """``expected`` says, for each emitted value, its layout and the captured value that it holds."""

    graph: fx.Graph
    report: Report
    expected: dict[fx.Node, tuple[Layout, fx.Node]] = field(default_factory=dict)


def rewrite(captured: Captured, sites: Sequence[Site], found: Inference, *, degree: int, group: str) -> Rewritten:
    """Emit the local graph of ``captured`` for ``degree`` ranks of the process group named ``group``."""
    emitter = _Emitter(captured, {s.node: s for s in sites}, found, degree, group)
    with tracing(None), captured.fake_mode, _restored_state():
        for node in captured.graph.nodes:
            emitter.node(node)
    emitter.graph.lint()
    return emitter.result


@contextmanager
def _restored_state() -> Iterator[None]:
    """Grad mode and autocast as they were, also if emitting stops inside a region."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        devices = [d for d in ("cpu", "cuda") if torch.amp.is_autocast_available(d)]
        before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        try:
            yield
        finally:
            for device, enabled, dtype in before:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)


class _Emitter:
    def __init__(
        self, captured: Captured, sites: dict[fx.Node, Site], found: Inference, degree: int, group: str
    ) -> None:
        self.captured, self.sites, self.found = captured, sites, found
        self.degree, self.group = degree, group
        self.mesh = [1, 1, degree]
        self.graph = fx.Graph()
        self.versions: dict[fx.Node, dict[Layout, fx.Node]] = {}
        self.plain: dict[fx.Node, fx.Node] = {}
        self.several: dict[fx.Node, list[fx.Node]] = {}
        self.masks: dict[tuple[Any, ...], fx.Node] = {}
        self.origin: fx.Node | None = None
        self.collectives: Counter[fx.Node] = Counter()  # by the captured node that they are for
        self.sent: Counter[fx.Node] = Counter()
        self.result = Rewritten(self.graph, Report(degree=degree, graphs=1))

    # values in the layout a call needs

    def value(self, node: fx.Node, layout: Layout) -> fx.Node:
        """The new node that holds ``node`` as ``layout``: as computed, sharded for free, moved, or gathered."""
        versions = self.versions[node]
        site = self.found.moves.get(node, {}).get(layout)  # type: ignore[arg-type]
        if layout not in versions and site is not None and REPLICATED not in versions:
            (home, local), *_ = versions.items()
            versions[layout] = self.switched(site, local, home, layout)  # type: ignore[arg-type]
            self.expect(versions[layout], layout, node)
        elif layout not in versions:
            whole = versions.get(REPLICATED) or self.gathered(node)
            if isinstance(layout, Sharded):
                self.result.report.shards += 1
                versions[layout] = self.emit(ops.shard._opoverload, *self.cut(whole, layout))
                self.expect(versions[layout], layout, node)
        return versions[layout]

    def gathered(self, node: fx.Node) -> fx.Node:
        """All of a sharded value on every rank: one all-gather."""
        (layout, local), *_ = self.versions[node].items()
        assert isinstance(layout, Sharded)
        assert self.origin is not None
        whole = self.emit(ops.unshard._opoverload, *self.cut(local, layout))
        self.expect(whole, REPLICATED, node)
        if node.meta.get("shared"):  # views of it must be views again
            whole = self.restrided(whole, node)
        self.versions[node][REPLICATED] = whole
        sent = _num_bytes(local) * (self.degree - 1)
        report = self.result.report
        if self.leaves(self.origin):
            report.unshards += 1
            report.unshard_bytes += sent
        else:
            between = 0 < len(report.attention) < len(self.sites)
            name, source = _op_name(self.origin), source_of(self.origin)
            report.regathers.append(RegatherEntry(name, source, self.reason(self.origin), sent, between))
        return whole

    def cut(self, value: fx.Node, layout: Sharded) -> tuple[Any, ...]:
        return value, layout.dim, layout.spec(), self.mesh, self.group

    def leaves(self, node: fx.Node) -> bool:
        """Does what is computed from here on only reach the outputs, by cheap ops and without sharded values?

        Then gathering here is gathering the output, a few cheap ops early.
        """
        seen, pending = set(), [node]
        while pending:
            n = pending.pop()
            if n in seen or n.op == "output" or n.target is aten.copy_.default:
                continue
            seen.add(n)
            plan = self.found.plans.get(n)
            lies_sharded = plan and any(isinstance(x, Sharded) for x in (*plan.operands, *plan.outputs))
            unknown = n.target is not operator.getitem and rule_for(n.target) is None and not n.meta.get("whole")
            if is_compute(n) or unknown or n in self.found.whole or lies_sharded:
                return False
            pending += n.users
        return True

    def reason(self, node: fx.Node) -> str:
        if node in self.found.sites:
            chosen = self.found.sites[node]
            if chosen.exchange == "replicated":
                return chosen.reason
            return f"what it reads is not cut as {chosen.exchange} takes it; sizes that ranks divide often avoid that"
        return self.found.regathered.get(node, "its operands are sharded along different dims")

    # nodes

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call in the new graph, run on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        assert self.origin is not None
        node.meta.update({k: self.origin.meta[k] for k in KEPT_META if k in self.origin.meta})
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def expect(self, new: fx.Node, layout: Layout, old: fx.Node) -> None:
        self.result.expected[new] = (layout, old)

    def node(self, node: fx.Node) -> None:
        self.origin = node
        if node.op == "placeholder":
            self.define(node, self.placeholder(node), REPLICATED)
        elif node.op == "get_attr":
            new = self.graph.get_attr(str(node.target))
            new.meta["val"] = node.meta.get("val")
            self.define(node, new, REPLICATED)
        elif node.op == "output":
            self.outputs(node)
        elif node.target is operator.getitem:
            self.getitem(node)
        elif node in self.sites:
            self.site(self.sites[node])
        else:
            self.call(node)

    def placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.placeholder(node.name)
        new.meta["val"] = node.meta["val"]
        new.meta["dynamo"] = node.meta["dynamo"]
        return new

    def define(self, old: fx.Node, new: fx.Node, layout: Any) -> None:
        """``new`` holds ``old``; a tuple of layouts belongs to a tuple of values."""
        if isinstance(layout, tuple) or not isinstance(new.meta.get("val"), Tensor):
            self.plain[old] = new
        else:
            self.versions[old] = {layout: new}
            self.expect(new, layout, old)

    def getitem(self, node: fx.Node) -> None:
        source, index = node.args
        several = self.several.get(source)  # type: ignore[arg-type]
        new = several[index] if several else self.emit(operator.getitem, self.plain[source], index)  # type: ignore[index]
        layouts = _result(self.found.plans.get(source), source)  # type: ignore[arg-type]
        self.define(node, new, layouts[index])

    def call(self, node: fx.Node) -> None:
        plan = self.found.plans.get(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            self.opaque(node)
        elif plan is not None and plan.build is not None:
            self.built(node, plan)
        elif plan is not None and plan.target is not None:
            operands = Call(node, self.degree, lambda key, n: (Segment(n),)).operands
            layouts = dict(zip(operands, plan.operands, strict=True))
            arguments = fx.map_arg(plan.arguments, lambda n: self.value(n, layouts[n]))
            local = [arguments[a.name] for a in plan.target._schema.arguments if a.name in arguments]
            self.define(node, self.emit(plan.target, *local), _result(plan, node))
        else:
            args, kwargs = self.local_arguments(node, plan)
            target = aten.reshape.default if node.target is aten.view.default else node.target
            self.define(node, self.emit(target, *args, **kwargs), _result(plan, node))

    def local_arguments(self, node: fx.Node, plan: Plan | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with every operand in the layout of the plan, each occurrence on its own."""
        given = bind(node)
        layouts = iter(plan.operands) if plan else None

        def local(n: fx.Node) -> fx.Node:
            if tensor_of(n) is None:
                return self.plain[n]
            return self.value(n, next(layouts) if layouts else REPLICATED)

        mapped = {name: fx.map_arg(value, local) for name, value in given.items()}
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        args = tuple(mapped[a.name] for a, _ in zip(schema, node.args, strict=False))
        return args, {name: mapped[name] for name in node.kwargs}

    def built(self, node: fx.Node, plan: Plan) -> None:
        """A call that becomes several, and what those send."""
        assert plan.build is not None
        layouts = iter(plan.operands)  # each occurrence of an operand on its own

        def local(n: fx.Node) -> fx.Node:
            return self.plain[n] if tensor_of(n) is None else self.value(n, next(layouts))

        given = {name: fx.map_arg(value, local) for name, value in bind(node).items()}
        new = plan.build(self, given)
        if isinstance(new, list):
            self.several[node] = new
        else:
            self.define(node, new, plan.outputs[0])
        if self.collectives[node]:
            self.result.report.reductions.append(
                ReductionEntry(_op_name(node), source_of(node), self.collectives[node], self.sent[node])
            )

    def filled(self, value: fx.Node, lay: Sharded, fill: float) -> fx.Node:
        if all(s.tokens % self.degree == 0 for s in lay.segments):
            return value
        return self.emit(ops.fill_padding._opoverload, value, lay.dim, lay.spec(), fill, self.mesh, self.group)

    def all_reduce(self, value: fx.Node, how: str) -> fx.Node:
        return self.moved(1, ops.all_reduce._opoverload, value, how, self.mesh)[0]

    def cumsum(self, value: fx.Node, lay: Sharded) -> fx.Node:
        return self.moved(1, ops.cumsum._opoverload, value, lay.dim, lay.spec(), self.mesh)[0]

    def halo(self, value: fx.Node, lay: Sharded, before: int, after: int, wraps: bool = False) -> fx.Node:
        return self.moved(1, ops.halo._opoverload, value, lay.dim, lay.spec(), before, after, wraps, self.mesh)[0]

    def pick(self, value: fx.Node, index: fx.Node, lay: Sharded) -> fx.Node:
        return self.moved(1, ops.pick._opoverload, value, index, lay.dim, lay.spec(), self.mesh)[0]

    def local_rows(self, index: fx.Node, lay: Sharded, wraps: bool) -> fx.Node:
        return self.emit(ops.local_rows._opoverload, index, lay.spec(), wraps, self.mesh, self.group)

    def unshard(self, value: fx.Node, lay: Sharded) -> fx.Node:
        return self.moved(1, ops.unshard._opoverload, value, lay.dim, lay.spec(), self.mesh)[0]

    def opaque(self, node: fx.Node) -> None:
        """Autocast and grad-mode markers, control flow: on whole values, as captured."""
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: self.value(n, REPLICATED) if n in self.versions else self.plain[n]
        )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            new = self.graph.call_function(node.target, args, kwargs)
            new.meta.update({k: node.meta[k] for k in (*KEPT_META, "val") if k in node.meta})
        else:
            new = self.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        self.define(node, new, _result(None, node))

    # attention

    def site(self, site: Site) -> None:
        chosen = self.found.sites[site.node]
        if chosen.mesh != NONE:
            self.exchange(site, chosen)
        else:
            self.local(site, chosen)
        self.result.report.attention.append(
            AttentionEntry(
                name=module_of(site.node),
                source=source_of(site.node),
                shape=(*site.shape("q"), site.shape("k")[-2]),
                exchange=chosen.exchange,
                kernel=site.op_name if chosen.kernel == CAPTURED else chosen.kernel,
                reason=chosen.reason,
                collectives=self.collectives[site.node],
                bytes_per_rank=self.sent[site.node],
                runner_up=chosen.runner_up,
                wasted=chosen.cost.wasted,
            )
        )

    def operands_of(self, site: Site, plan: Plan) -> list[fx.Node]:
        """q, k and v in the plan's layouts, in the dtype of the attention."""
        dtype = site.node.meta["val"].dtype
        tensors = zip((site.q, site.k, site.v), plan.operands, strict=False)
        return [self.cast(self.value(n, layout), dtype) for n, layout in tensors]

    def exchange(self, site: Site, chosen: SitePlan) -> None:
        """Collect what the queries need, attend, and bring the outputs home."""
        q, k, v = self.operands_of(site, chosen.plan)
        q_spec, kv_spec = (lay.spec() for lay in chosen.plan.operands[:2])  # type: ignore[union-attr]
        mesh = list(chosen.mesh)
        _, gather, ulysses = mesh
        num_heads = site.shape("q")[-3] if ulysses > 1 else 1
        if ulysses > 1:
            q, k, v = self.moved(3, ops.ulysses_in._opoverload, q, k, v, q_spec, kv_spec, mesh)
        if gather > 1:
            k, v = self.moved(2, ops.kv_gather._opoverload, k, v, None, kv_spec, mesh)
        out = self.attend(site, (q, k, v, self.mask(site, q_spec, mesh)), q_spec, kv_spec, chosen)
        if ulysses > 1:
            (out,) = self.moved(1, ops.ulysses_out._opoverload, out, num_heads, q_spec, mesh)
        self.define(site.node, out, chosen.plan.outputs[0])

    def local(self, site: Site, chosen: SitePlan) -> None:
        """On what this rank holds; if that was moved here, the output goes home."""
        q, k, v = self.operands_of(site, chosen.plan)
        mask = self.value(site.mask, chosen.plan.operands[3]) if site.mask is not None else None
        positions = chosen.plan.operands[0]
        cut = chosen.block != NONE and isinstance(positions, Sharded)
        q_spec = positions.spec() if cut else [1, 1, q.meta["val"].shape[-2]]  # type: ignore[union-attr]
        out = self.attend(site, (q, k, v, mask), q_spec, [1, 1, k.meta["val"].shape[-2]], chosen)
        home = chosen.plan.outputs[0]
        if positions != home:
            out = self.sent_home(site, out, positions, home)  # type: ignore[arg-type]
        self.define(site.node, out, home)

    def sent_home(self, site: Site, out: fx.Node, away: Sharded, home: Sharded) -> fx.Node:
        """The output [..., H, S, E] with its tokens cut again, moved as [..., S, H, E]: as models store it."""
        tokens, heads = home.dim, home.dim - 1
        out = self.emit(aten.transpose.int, out, heads, tokens)
        out = self.switched(site.node, out, away, home.at(heads))
        return self.emit(aten.transpose.int, out, heads, tokens)

    def switched(self, site: fx.Node, value: fx.Node, have: Sharded, want: Sharded) -> fx.Node:
        """A value cut along another dim, for the sake of a site."""
        cuts = (have.dim, have.spec(), want.dim, want.spec())
        return self.moved_for(site, 1, ops.switch._opoverload, value, *cuts, self.mesh)[0]

    def attend(
        self, site: Site, tensors: tuple[fx.Node | None, ...], q_spec: list[int], kv_spec: list[int], chosen: SitePlan
    ) -> fx.Node:
        """The attention itself: the captured call on these tensors, or a named kernel, with a ring if asked for."""
        named = dict(zip(("q", "k", "v", "mask"), tensors, strict=True))
        if chosen.kernel == CAPTURED and "captured_call" in site.node.meta:
            return site.node.meta["captured_call"].emit(self.emit, named, lambda n: self.value(n, REPLICATED))
        if chosen.kernel == CAPTURED:
            return self.captured_sdpa(site, named)
        args = (*tensors, q_spec, kv_spec, site.causal, site.scale, chosen.kernel, list(chosen.block))
        hops = chosen.block[0] - 1
        self.collectives[site.node] += hops
        self.sent[site.node] += hops * sum(_num_bytes(x) for x in tensors[1:3] if x is not None)
        return self.emit(ops.attention._opoverload, *args, self.group)

    def moved(self, count: int, op: torch._ops.OpOverload, *args: Any) -> list[fx.Node]:
        """Emit an op with ``count`` results, and count its collectives and what they send."""
        assert self.origin is not None
        return self.moved_for(self.origin, count, op, *args)

    def moved_for(self, origin: fx.Node, count: int, op: torch._ops.OpOverload, *args: Any) -> list[fx.Node]:
        """`moved`, counted for another node than the one that is emitted."""
        node = self.emit(op, *args, self.group)
        shapes: Any = fx.map_arg(args, lambda n: torch.empty_like(n.meta["val"], device="meta"))
        collectives, sent = ops.wire.bytes_sent(ops.PROGRAMS[op](0, *shapes), args[-1])
        self.collectives[origin] += collectives
        self.sent[origin] += sent
        return [node] if count == 1 else [self.emit(operator.getitem, node, i) for i in range(count)]

    def captured_sdpa(self, site: Site, tensors: dict[str, fx.Node | None]) -> fx.Node:
        """The captured ``scaled_dot_product_attention`` on other tensors."""
        names = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}
        schema = site.node.target._schema.arguments  # type: ignore[union-attr]
        given = [(a.name, value) for a, value in zip(schema, site.node.args, strict=False)]
        args = [tensors[names[name]] if name in names else value for name, value in given]
        kwargs = {n: tensors[names[n]] if n in names else value for n, value in site.node.kwargs.items()}
        return self.emit(site.node.target, *args, **kwargs)  # type: ignore[arg-type]

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Under autocast the attention call would cast; doing it before the exchange moves fewer bytes."""
        if value.meta["val"].dtype == dtype:
            return value
        return self.emit(aten._to_copy.default, value, dtype=dtype)

    def mask(self, site: Site, q_spec: list[int], mesh: list[int]) -> fx.Node | None:
        """The mask in global token order, cut to this rank's heads and rows."""
        if site.mask is None:
            return None
        whole = self.value(site.mask, REPLICATED)
        num_heads = site.shape("q")[-3] if len(site.shape("q")) > 2 else 1
        if not ops.masks.needs_cut(whole.meta["val"], num_heads, mesh):
            return whole
        key = (site.mask, num_heads, tuple(q_spec), tuple(mesh))
        if key not in self.masks:
            self.masks[key] = self.emit(ops.local_mask._opoverload, whole, num_heads, q_spec, mesh, self.group)
        return self.masks[key]

    # results

    def outputs(self, node: fx.Node) -> None:
        """Whole results with the strides they had."""
        results: list[Any] = list(node.args[0])  # type: ignore[arg-type]
        for i, result in enumerate(results):
            if isinstance(result, fx.Node):
                whole = self.value(result, REPLICATED) if result in self.versions else self.plain[result]
                results[i] = self.restrided(whole, result)
        self.graph.output(tuple(results))

    def restrided(self, whole: fx.Node, captured: fx.Node) -> fx.Node:
        """``whole`` with the captured value's strides, if those are dense: callers may have looked at them."""
        have, want = tensor_of(whole), tensor_of(captured)
        if have is None or want is None or have.stride() == want.stride():
            return whole
        order = sorted(range(want.dim()), key=lambda d: (-want.stride()[d], d))
        dense = torch.empty_like(want).permute(order).is_contiguous() and want.permute(order).is_contiguous()
        if not dense:
            return whole
        packed = self.emit(
            aten.clone.default, self.emit(aten.permute.default, whole, order), memory_format=torch.contiguous_format
        )
        return self.emit(aten.permute.default, packed, [order.index(d) for d in range(want.dim())])


def _result(plan: Plan | None, node: fx.Node) -> Any:
    """The layout, or a tuple of layouts, of what a call gives."""
    value = node.meta["val"]
    if value is None:
        return REPLICATED
    whole = Plan((), tuple(REPLICATED for _ in value) if isinstance(value, (tuple, list)) else (REPLICATED,))
    return (plan or whole).layout_of(value)


def _num_bytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _op_name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")
