"""Stage 8: what of the rewritten graph CUDA graphs can hold, and the memory that lies between them.

The calls stay in their order. A run of calls that can be captured is a *piece*, what lies between two pieces is a *gap*
and runs eagerly. Views and constants belong to neither: every part makes its own, so that what crosses a border is
always a value with memory of its own. A value that a piece reads or writes across a border lies in a *buffer*, whose
address never changes: pieces write there, and so do gaps, exchanges by their ``_into`` variants.

It works on fake tensors, so graphs for a GPU are cut and checked without one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from spcompile import ops
from spcompile.errors import SPConfigError, UnsupportedGraphError
from spcompile.infer import is_random
from spcompile.report import PieceEntry, SplitEntry
from spcompile.source import place, source_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """What a part of the graph reads or writes across its border.

    ``kind``: ``"parameter"`` (read where it lies), ``"input"`` (copied into a buffer at every step if a piece reads
    it), ``"computed"``. ``slot``: the buffer it lies in, None for what pieces never see.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    slot: int | None = None

    @property
    def num_bytes(self) -> int:
        """From the first to the last byte that it touches."""
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A piece or a gap. ``module(*reads, *writes)`` writes into the buffers ``writes`` and returns ``returns``.

    ``splits`` are the calls that keep a gap out of CUDA graphs, and why.
    """

    captured: bool
    calls: list[fx.Node]
    reads: list[str]
    writes: list[str]
    returns: list[str]
    splits: list[tuple[fx.Node, str]]
    module: fx.GraphModule


@dataclass(frozen=True)
class Partition:
    """The parts in order, then ``end``, which makes the graph's outputs of the values it reads.

    ``slots`` are the sizes of the buffers in bytes; values that are never there at the same time share one.
    ``lifetimes``: per value in a buffer, the part that writes it (-1: the step's start) and the last that reads it.
    """

    inputs: list[str]
    parts: list[Part]
    end: Part
    values: dict[str, Value]
    slots: list[int]
    lifetimes: dict[str, tuple[int, int]]

    @property
    def num_pieces(self) -> int:
        return sum(p.captured for p in self.parts)

    def entries(self) -> list[PieceEntry]:
        """For the report."""
        return [self._entry(p) for p in self.parts]

    def _entry(self, part: Part) -> PieceEntry:
        kinds = Counter(self.values[name].kind for name in part.reads)
        return PieceEntry(
            captured=part.captured,
            holds=dict(Counter(_short(n) for n in part.calls)),
            parameters=kinds["parameter"],
            inputs=kinds["input"],
            reads=kinds["computed"],
            writes=len(part.writes),
            bytes_written=sum(self.values[name].num_bytes for name in part.writes),
            splits=[SplitEntry(_short(n), source_of(n), why) for n, why in part.splits],
        )


def partition(root: fx.GraphModule, graph: fx.Graph, form: str, device: str) -> Partition:
    """Cut ``graph``, whose attributes are ``root``'s, for graphs on a kind of ``device``.

    Args:
        form: ``"piecewise"``, or ``"full"`` for one piece of everything.
        device: ``"cuda"``; or where a stand-in for CUDA graphs records, in tests.
    Raises:
        SPConfigError: nothing in the graph is on ``device``.
        UnsupportedGraphError: ``form="full"``, and something cannot be captured; or the graph sets a mode that no part
            of it can set again.
    """
    cut = _Cut(root, graph, form, device)
    if not any(x.device.type == device for n in graph.nodes for x in _tensors(n)):
        found = sorted({x.device.type for n in graph.nodes for x in _tensors(n)})
        raise SPConfigError(
            "SP112",
            f"cudagraphs={form!r} captures work on {device}, and this graph is on {', '.join(found)}: move the model "
            f"and its inputs to {device}, or leave cudagraphs out",
        )
    if form == "full" and cut.hindrances:
        listed = "".join(f"\n  {_short(n)} at {place(n)}: {why}" for n, why in cut.hindrances.items())
        raise UnsupportedGraphError(
            "SP215",
            f"cudagraphs='full' captures a step as one CUDA graph, and this graph has what cannot be "
            f"captured:{listed}\nUse cudagraphs='piecewise', which runs these between captured pieces",
        )
    return cut.partition()


def is_trivial(node: fx.Node) -> bool:
    """Does the call cost nothing: a view of its operand, an attribute, or a constant that is quick to make again?"""
    if node.op == "get_attr":
        return True
    if node.target is operator.getitem:
        return is_trivial(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not node.all_input_nodes:
        return node.target.namespace == "aten" and not is_random(node)
    if not node.target.is_view or len(node.all_input_nodes) != 1:
        return False
    of = node.all_input_nodes[0].meta["val"]
    results = _tensors(node)
    return isinstance(of, Tensor) and all(_memory(x) == _memory(of) for x in results)


def hindrance(node: fx.Node, device: str, form: str) -> str | None:
    """Why a CUDA graph on ``device`` cannot hold the call, or None."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "control flow is decided on the host"
    if (declared := ops.DECLARED.get(target)) is not None:
        if why := declared.hindrance(node.args):
            return why
        if declared.exchanges(node.args):
            if form == "piecewise":
                return "an exchange between ranks"
            if not ops.wire.is_capturable(str(node.args[-1])):
                return "an exchange through a group that is not NCCL's runs on the host"
    if target._schema.is_mutable:
        return "it writes into a graph input, which may lie elsewhere in the next step"
    if is_random(node):
        return "it draws random numbers"
    if elsewhere := _elsewhere(node, device):
        return f"it works on {elsewhere} memory"
    return _waits(node)


WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor}
CHECKED = ("linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_eig", "linalg_svd", "linalg_lstsq", "inverse")
"""Beginnings of names of ops that look for errors on the host."""


def _waits(node: fx.Node) -> str | None:
    """Why the host would wait for the device within the call, or None."""
    target: Any = node.target
    if target in INDEXED:
        indices = [n.meta["val"] for n in node.args[1] if n is not None]  # type: ignore[union-attr]
        waits = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
    else:
        waits = bool(WAITS & set(target.tags)) or target.__name__.startswith(CHECKED)
    if waits:
        return "the host waits for its result"
    return "torch declares it unsafe in CUDA graphs" if is_cudagraph_unsafe_fx_node(node) else None


def _elsewhere(node: fx.Node, device: str) -> str | None:
    """Another kind of device that the call reads or writes. A constant number may lie anywhere: it never changes."""
    read = [x for n in node.all_input_nodes for x in _tensors(n) if not (x.dim() == 0 and _is_constant(n))]
    return next((x.device.type for x in (*read, *_tensors(node)) if x.device.type != device), None)


def _is_constant(node: fx.Node) -> bool:
    """Is it made of nothing that a step brings?"""
    return is_trivial(node) and all(map(_is_constant, node.all_input_nodes))


class _Cut:
    """The graph, seen as calls that cost something. Numbers of parts are indices; the end comes after the last."""

    def __init__(self, root: fx.GraphModule, graph: fx.Graph, form: str, device: str) -> None:
        self.root, self.graph, self.form, self.device = root, graph, form, device
        self.trivial = {n for n in graph.nodes if n.op in ("call_function", "get_attr") and is_trivial(n)}
        self.modes = _modes(graph)
        self.calls = [n for n in graph.nodes if n.op == "call_function" and self._is_call(n)]
        self.hindrances = {n: why for n in self.calls if (why := hindrance(n, device, form)) is not None}

    def _is_call(self, node: fx.Node) -> bool:
        return node not in self.trivial and node.target is not operator.getitem and node in self.modes

    def partition(self) -> Partition:
        runs = self._runs()
        part_of = {n: i for i, run in enumerate(runs) for n in run}
        captured = [run[0] not in self.hindrances for run in runs]
        last, readers = self._readers(runs, part_of)
        in_pieces = {v for v, parts in readers.items() if any(i < last and captured[i] for i in parts)}
        written = {v: part_of[_maker(v)] for v in readers if v.op != "placeholder"}
        buffered = {v for v in readers if v in in_pieces or (v in written and captured[written[v]])}
        buffered -= {v for v in buffered if _is_parameter(v)}
        lifetimes = {v: (written.get(v, -1), max(readers[v])) for v in self._in_order(buffered)}
        slots, sizes = _share(lifetimes)
        values = {v.name: _value(v, slots.get(v)) for v in self._in_order(readers)}
        parts = []
        for i, run in enumerate(runs):
            outs = [v for v in self._in_order(readers) if written.get(v) == i]
            reads = [v for v in self._in_order(readers) if i in readers[v]]
            parts.append(
                self._part(run, reads, [v for v in outs if v in buffered], [v for v in outs if v not in buffered])
            )
        end = self._end([v for v in self._in_order(readers) if last in readers[v]])
        inputs = [n.name for n in self.graph.find_nodes(op="placeholder")]
        return Partition(inputs, parts, end, values, sizes, {v.name: span for v, span in lifetimes.items()})

    def _runs(self) -> list[list[fx.Node]]:
        """Calls next to each other that are captured, or not."""
        runs: list[list[fx.Node]] = []
        for node in self._hoisted():
            if not runs or (runs[-1][0] in self.hindrances) != (node in self.hindrances):
                runs.append([])
            runs[-1].append(node)
        return runs

    def _hoisted(self) -> list[fx.Node]:
        """The calls; first those that run eagerly, talk to nobody and need no result of a captured call."""
        first: dict[fx.Node, None] = {}
        for node in self.calls:
            functional = node in self.hindrances and _is_functional(node)
            if functional and all(v.op == "placeholder" or _maker(v) in first for v in self._roots([node])):
                first[node] = None
        return [*first, *(n for n in self.calls if n not in first)]

    def _roots(self, operands_of: Sequence[fx.Node]) -> dict[fx.Node, None]:
        """The values with memory of their own from which calls compute, through views."""
        found: dict[fx.Node, None] = {}
        pending = [n for call in operands_of for n in call.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in self.trivial:
                pending += node.all_input_nodes
            else:
                found[node] = None
        return found

    def _readers(self, runs: list[list[fx.Node]], part_of: dict[fx.Node, int]) -> tuple[int, dict[fx.Node, set[int]]]:
        """The number of the end, and per value that crosses a border, the parts that read it."""
        last, readers = len(runs), dict[fx.Node, set[int]]()
        for i, calls in enumerate([*runs, [self.graph.output_node()]]):
            for value in self._roots(calls):
                if value.op == "placeholder" or part_of[_maker(value)] != i:
                    readers.setdefault(value, set()).add(i)
        return last, readers

    def _in_order(self, values: Any) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n in values]

    def _part(self, run: list[fx.Node], reads: list[fx.Node], writes: list[fx.Node], returns: list[fx.Node]) -> Part:
        captured = run[0] not in self.hindrances
        emitter = _Emitter(self.root, self.trivial, reads, writes)
        for node in run:
            emitter.enter(self.modes[node])
            emitter.call(node, in_place=not captured)
        module = emitter.module(returns)
        splits = [(n, self.hindrances[n]) for n in run if n in self.hindrances]
        return Part(captured, run, _names(reads), _names(writes), _names(returns), splits, module)

    def _end(self, reads: list[fx.Node]) -> Part:
        emitter = _Emitter(self.root, self.trivial, reads, [])
        module = emitter.module(self.graph.output_node().args[0])
        return Part(False, [], _names(reads), [], [], [], module)


class _Emitter:
    """Writes one part as a graph of its own: what it reads and the buffers it writes are its placeholders."""

    def __init__(
        self, root: fx.GraphModule, trivial: set[fx.Node], reads: list[fx.Node], writes: list[fx.Node]
    ) -> None:
        self.root, self.trivial, self.graph = root, trivial, fx.Graph()
        self.env = {v: self._placeholder(v, v.name) for v in reads}
        self.buffers = {v: self._placeholder(v, f"{v.name}_buffer") for v in writes}
        self.written: set[fx.Node] = set()
        self.mode: dict[fx.Node, fx.Node] = {}

    def _placeholder(self, value: fx.Node, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value.meta["val"]
        return node

    def enter(self, mode: tuple[fx.Node, ...]) -> None:
        """Be inside of the autocast regions ``mode``, the outermost first."""
        while tuple(self.mode) != mode[: len(self.mode)]:
            _, entered = self.mode.popitem()
            self.graph.call_function(_exit_autocast, (entered,))
        for region in mode[len(self.mode) :]:
            self.mode[region] = self.graph.call_function(_enter_autocast, region.args)

    def get(self, node: fx.Node) -> fx.Node:
        """The node in this part; a view is made when it is first wanted."""
        if node not in self.env:
            assert node in self.trivial, node
            self.env[node] = self.graph.node_copy(node, self.get)
        return self.env[node]

    def call(self, node: fx.Node, in_place: bool) -> None:
        results = _results(node)
        target: Any = node.target
        variant = ops.INTO.get(target) if in_place else None
        if variant is not None and all(results) and all(r in self.buffers for r in results):
            args = [*fx.map_arg(node.args, self.get), *(self.buffers[r] for r in results)]  # type: ignore[index]
            new = self.graph.call_function(variant, tuple(args))
            new.meta.update({k: v for k, v in node.meta.items() if k != "val"})
            self.env.update({r: self.buffers[r] for r in results if r is not None})
            self.written.update(r for r in results if r is not None)
            return
        self.env[node] = self.graph.node_copy(node, self.get)
        for result in results:
            if result is not None and result is not node:
                self.env[result] = self.graph.node_copy(result, self.get)

    def module(self, outputs: Any) -> fx.GraphModule:
        self.enter(())
        for value, buffer in self.buffers.items():
            if value not in self.written:
                self.graph.call_function(aten.copy_.default, (buffer, self.env[value]))
        self.graph.output(fx.map_arg(tuple(outputs), self.get))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "Part")


def _results(node: fx.Node) -> list[fx.Node | None]:
    """The nodes that stand for a call's results: itself, or one that picks each; None where nobody reads it."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return [node]
    found: list[fx.Node | None] = [None] * len(node.meta["val"])
    for user in node.users:
        assert user.target is operator.getitem, f"{user} reads all results of {node} at once"
        found[user.args[1]] = user  # type: ignore[index]
    return found


def _names(values: Sequence[fx.Node]) -> list[str]:
    return [v.name for v in values]


def _maker(value: fx.Node) -> fx.Node:
    """The call that a value is a result of."""
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def _is_functional(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or is_random(node):
        return False
    return target not in ops.PROGRAMS or not ops.DECLARED[target].exchanges(node.args)


def _modes(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Per call, the autocast regions it is in. The markers themselves are not among the calls."""
    inside: list[fx.Node] = []
    modes: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if node.target is _enter_autocast:
            inside.append(node)
        elif node.target is _exit_autocast:
            inside.remove(node.args[0])
        elif node.target is torch._C._set_grad_enabled:
            continue  # nothing is differentiated
        elif node.op == "call_function":
            known = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
            if not isinstance(node.target, known) and node.target is not operator.getitem:
                raise UnsupportedGraphError(
                    "SP215",
                    f"{place(node)}: `{node.target}` sets a mode, and parts of the graph would run without it. "
                    "Leave cudagraphs out",
                )
            modes[node] = tuple(inside)
    return modes


def _is_parameter(node: fx.Node) -> bool:
    """Is it a parameter or buffer of a module, or marked static: in one place for good?"""
    source = node.meta.get("dynamo")
    return source is not None and "_dynamo_static_input_type" in (source.meta.get("tensor_dict") or {})


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _value(node: fx.Node, slot: int | None) -> Value:
    x = node.meta["val"]
    if not isinstance(x, Tensor):
        return Value(node.name, "input", (), (), torch.uint8, torch.device("cpu"))
    kind = "computed" if node.op != "placeholder" else "parameter" if _is_parameter(node) else "input"
    stride = tuple(x.stride()) if _without_overlap(x, expanded=kind == "input") else _dense(x.shape)
    return Value(node.name, kind, tuple(x.shape), stride, x.dtype, x.device, slot)


def _without_overlap(x: Tensor, expanded: bool) -> bool:
    """Has every entry a place of its own? Those of an ``expanded`` dim may share one."""
    reach = 0
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and not (expanded and stride == 0):
            if stride <= reach:
                return False
            reach += (n - 1) * stride
    return True


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


ALIGNMENT = 512
"""Bytes; what CUDA's allocator gives."""


def _share(lifetimes: dict[fx.Node, tuple[int, int]]) -> tuple[dict[fx.Node, int], list[int]]:
    """A slot for each value, of those free since before the part that writes it; the sizes of the slots.

    Not of those that this part still reads: what it writes and what it reads are different memory.
    """
    slots: dict[fx.Node, int] = {}
    sizes: list[int] = []
    free_after: list[int] = []
    devices: list[torch.device] = []
    for value, (start, end) in sorted(lifetimes.items(), key=lambda item: item[1][0]):
        need = -(-max(_value(value, None).num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        device = value.meta["val"].device
        fits = [i for i, size in enumerate(sizes) if free_after[i] < start and size == need and devices[i] == device]
        slot = fits[0] if fits else len(sizes)
        if not fits:
            sizes.append(need)
            free_after.append(end)
            devices.append(device)
        slots[value], free_after[slot] = slot, end
    return slots, sizes


def _short(node: fx.Node) -> str:
    """``linear``, ``ulysses_in``."""
    target: Any = node.target
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else str(target)


def texts(partition: Partition) -> Iterator[str]:
    """Every part for people: what it is, what it reads and writes, its code."""
    for i, part in enumerate([*partition.parts, partition.end]):
        kind = "piece" if part.captured else "gap" if part.calls else "end"
        lines = [f"# {kind} {i}: {len(part.calls)} calls"]
        lines += [f"#   eager: {_short(n)} at {source_of(n)}: {why}" for n, why in part.splits]
        for what, names in (("reads", part.reads), ("writes", part.writes)):
            for name in names:
                value = partition.values[name]
                where = "" if value.slot is None else f" in buffer {value.slot}"
                lines.append(f"#   {what} {value.kind} {name} {list(value.shape)} {value.dtype}{where}")
        code = part.module.print_readable(print_output=False)
        yield "\n".join([*lines, code, ""])
