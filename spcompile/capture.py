"""Stage 1: from Dynamo's graph to one functional ATen graph, taken before autograd dispatch.

Pre-dispatch means that ``scaled_dot_product_attention``, ``linear`` and ``layer_norm`` are single nodes,
whatever Python name the model called them by. Functional means that no node writes into another's value:
writes into graph inputs stand as ``copy_`` at the very end. Sizes are plain ints: a symbolic size that Dynamo
hands over is specialised, which leaves a guard, so that another resolution gets a graph of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    has_metadata_mutation,
    to_fun,
)
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spcompile.errors import UnsupportedGraphError
from spcompile.sharing import keep_sharing
from spcompile.simplify import simplify
from spcompile.source import place, source_of

aten = torch.ops.aten
higher_order = torch.ops.higher_order

INLINED = {
    higher_order.tag_activation_checkpoint: 1,
    higher_order.invoke_subgraph: 2,
}
"""Wrappers around a plain call of their first argument, and where that call's own arguments begin."""

UNTRACEABLE = {
    "_vmap_increment_nesting": "torch.vmap",
    "_grad_increment_nesting": "torch.func.grad",
    "_jvp_increment_nesting": "torch.func.jvp",
    "while_loop": "while_loop",
}
"""Name of an op in Dynamo's graph -> what the model called, that this capture cannot take."""

DECOMPOSED: Any = get_decompositions([aten.pixel_shuffle, aten.pixel_unshuffle])
"""Ops that are taken apart into views and permutations, as torch itself does."""

BOOKKEEPING = {aten._assert_tensor_metadata.default}
"""Notes of the tracer to itself."""


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph with one placeholder per placeholder of Dynamo's graph, in its order.

    Inputs that are tensor subclasses have one for each tensor they are made of (``subclasses``).

    ``node.meta["val"]`` holds each value as a fake tensor of ``fake_mode``. Outputs that lie in an input's or
    another output's memory end in view ops of their own, marked ``node.meta["whole"]``: computed on whole values,
    they lie there again. ``refusals`` are ways of sharing memory that a functional graph cannot express.
    """

    graph_module: fx.GraphModule
    fake_mode: FakeTensorMode
    refusals: list[str]
    subclasses: Subclasses

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph


@dataclass(frozen=True)
class Subclasses:
    """Graph inputs that are wrapper subclasses (quantised weights) are taken apart: the graph sees plain tensors.

    ``makers`` has one entry per graph input: None for a plain one, else how many tensors it is made of and how it is
    made of them.
    """

    makers: list[tuple[int, Callable[[Sequence[Any]], Any]] | None]

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> Subclasses:
        return cls([_maker(x) if is_traceable_wrapper_subclass(x) else None for x in inputs])

    def __bool__(self) -> bool:
        return any(self.makers)

    def flat(self, inputs: Sequence[Any]) -> list[Any]:
        """Graph inputs with every subclass taken apart."""
        parts = [parts_of(x) if maker else [x] for x, maker in zip(inputs, self.makers, strict=True)]
        return [part for several in parts for part in several]

    def rebuilt(self, flat: Sequence[Any]) -> list[Any]:
        """The graph inputs again."""
        left = list(flat)[::-1]
        return [maker[1]([left.pop() for _ in range(maker[0])]) if maker else left.pop() for maker in self.makers]

    def of_each(self, values: Sequence[Any]) -> list[Any]:
        """One value per graph input, repeated for the parts of a subclass."""
        return [v for v, maker in zip(values, self.makers, strict=True) for _ in range(maker[0] if maker else 1)]


def parts_of(x: Any) -> list[Any]:
    """The plain tensors a wrapper subclass is made of, in order; anything else is itself."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in parts_of(getattr(x, name))]


def _maker(x: Any) -> tuple[int, Callable[[Sequence[Any]], Any]]:
    """How many tensors ``x`` is made of, and how to make one like it of others."""
    if not is_traceable_wrapper_subclass(x):
        return 1, lambda parts: parts[0]
    kind, (names, context), size, stride = type(x), x.__tensor_flatten__(), x.shape, x.stride()
    makers = [_maker(getattr(x, name)) for name in names]

    def make(parts: Sequence[Any]) -> Any:
        inner, start = {}, 0
        for name, (count, make_inner) in zip(names, makers, strict=True):
            inner[name] = make_inner(parts[start : start + count])
            start += count
        return kind.__tensor_unflatten__(inner, context, size, stride)

    return sum(count for count, _ in makers), make


class _Inliner(fx.Interpreter):
    """Runs Dynamo's graph; activation checkpoints and nested compile regions become part of it."""

    def __init__(self, module: fx.GraphModule, attributes: dict[str, Tensor]) -> None:
        _require_traceable(module)
        super().__init__(module)
        self.attributes = attributes

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return (
            self.attributes.get(target, None) if target in self.attributes else super().get_attr(target, args, kwargs)
        )

    def run_node(self, n: fx.Node) -> Any:
        """Numbers that change from call to call arrive as tensors with .item(): specialised, as sizes are."""
        value = n.meta.get("example_value")
        if n.op == "call_method" and n.target == "item" and isinstance(value, (torch.SymFloat, torch.SymInt)):
            return float(value) if isinstance(value, torch.SymFloat) else int(value)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in INLINED:
            body, operands = simplify(args[0]), args[INLINED[target] :]
            return _Inliner(body, {}).run(*operands)
        if target is torch.Tensor and len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].detach()  # the constructor makes an alias that tracing does not see
        if target is _enter_autocast:
            return self._enter_autocast(args)
        if target is _exit_autocast:
            return self._exit_autocast(args[0])
        return super().call_function(target, args, kwargs)

    def _enter_autocast(self, args: Any) -> tuple[Any, Any]:
        """Tracing records the node but does not enter; without entering, every dtype after it would be wrong."""
        recorded = _enter_autocast(*args) if torch._C._is_torch_function_mode_enabled() else None
        with torch._C.DisableTorchFunction():
            return recorded, _enter_autocast(*args)

    def _exit_autocast(self, entered: tuple[Any, Any]) -> None:
        recorded, mode = entered
        if recorded is not None:
            _exit_autocast(recorded)
        with torch._C.DisableTorchFunction():
            _exit_autocast(mode)


def _require_traceable(module: fx.GraphModule) -> None:
    found = [(i, n) for i, n in enumerate(module.graph.nodes) if getattr(n.target, "__name__", "") in UNTRACEABLE]
    if found:
        first, node = found[0]
        where = next((n for n in list(module.graph.nodes)[first:] if n.meta.get("stack_trace")), node)
        raise UnsupportedGraphError(
            "SP201",
            f"{source_of(where)}: {UNTRACEABLE[node.target.__name__]} cannot be traced together with attention. "
            "Write it out, or put torch.compiler.disable on the function that calls it: it then runs on full tensors",
        )


def capture(dynamo: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Trace Dynamo's graph on fake inputs of static size."""
    dynamo = simplify(dynamo)
    subclasses = Subclasses.of(example_inputs)
    inputs = [int(x) if isinstance(x, torch.SymInt) else x for x in subclasses.flat(example_inputs)]
    attributes = {n.target: _attribute(dynamo, n.target) for n in dynamo.graph.nodes if n.op == "get_attr"}
    attributes = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    flat = [*inputs, *attributes.values()]
    fake_mode = FakeTensorMode(shape_env=None)

    def fakes() -> list[Any]:
        return [fake_mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x for x in flat]

    def run(*values: Any) -> Any:
        named = dict(zip(attributes, values[len(inputs) :], strict=True))
        return _Inliner(dynamo, named).run(*subclasses.rebuilt(values[: len(inputs)]))

    mutated: list[int] = []
    refusals: list[str] = []

    def functional(*values: Any) -> Any:
        with FunctionalTensorMode(pre_dispatch=True, export=True):
            wrapped = [to_fun(v) for v in values]
            outputs = run(*wrapped)
            for i, w in enumerate(wrapped):
                if isinstance(w, Tensor) and has_metadata_mutation(w, values[i], check_only_storage_mutation=False):
                    refusals.append(
                        f"graph input {i} changes its shape or storage in place; write x = x.t() for x.t_()"
                    )
                if isinstance(w, Tensor) and has_data_mutation(w):
                    mutated.append(i)
            return [from_fun(o) for o in (*outputs, *(wrapped[i] for i in mutated))]

    # Dynamo's tracing context holds another fake mode; this one must be the only one in sight.
    with tracing(None), fake_mode, fx_traceback.preserve_node_meta(), _functorch_as_found():
        originals = fakes()
        eager_outputs = run(*originals)
        tracer = make_fx(functional, DECOMPOSED, "real", pre_dispatch=True, record_module_stack=False)
        traced = tracer(*fakes())

    _restore_placeholders(traced, subclasses.of_each(dynamo.graph.find_nodes(op="placeholder")), attributes, originals)
    _end_with_copies(traced, len(eager_outputs), mutated)
    refusals += _clean(traced, fake_mode)
    refusals += _shared_inputs(inputs, mutated)
    refusals += keep_sharing(traced.graph, eager_outputs, originals[: len(inputs)])
    traced.recompile()
    if any(is_traceable_wrapper_subclass(x) for x in eager_outputs):
        refusals.append("an output is a tensor subclass; return a plain tensor")
    return Captured(traced, fake_mode, refusals, subclasses)


def retarget(captured: Captured, device: str) -> None:
    """Pretend that all of a captured graph is on ``device``: to plan for one that is not there."""
    on_device = torch.device(device)

    def moved(x: Any) -> Any:
        return on_device if isinstance(x, torch.device) else x

    with tracing(None), captured.fake_mode:
        for node in captured.graph.nodes:
            value = node.meta.get("val")
            node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
            if node.target is aten.view.default:  # the other device's kernels may give other strides
                node.target = aten.reshape.default
            if node.op in ("placeholder", "get_attr") and isinstance(value, Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            elif isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _clean(traced: fx.GraphModule, fake_mode: FakeTensorMode) -> list[str]:
    """Drop what computes nothing, and give constants their fake tensors. Returns why that cannot be."""
    refusals = []
    for node in reversed(traced.graph.nodes):
        if node.target in BOOKKEEPING:
            traced.graph.erase_node(node)
        elif node.target is aten.dropout.default and not (node.args[1] and node.args[2]):
            node.replace_all_uses_with(node.args[0])  # it returns its operand
        elif node.op == "get_attr" and "val" not in node.meta:
            constant = _attribute(traced, node.target)
            if isinstance(constant, FakeTensor):
                refusals.append(f"{place(next(iter(node.users)))} uses a tensor that is made out of tracing's sight")
            elif isinstance(constant, Tensor):
                node.meta["val"] = fake_mode.from_tensor(constant, static_shapes=True)
    traced.graph.eliminate_dead_code(lambda n: n.is_impure() or "_assert_" in str(n.target))
    traced.recompile()
    return refusals


@contextmanager
def _functorch_as_found() -> Iterator[None]:
    """Tracing that fails inside a vmap must not leave its level behind."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _restore_placeholders(
    traced: fx.GraphModule, sources: list[fx.Node], attributes: dict[str, Tensor], originals: list[Any]
) -> None:
    """Give the placeholders their Dynamo names, and turn those of Dynamo's attributes back into attributes."""
    nodes = traced.graph.find_nodes(op="placeholder")
    for node, source, value in zip(nodes, sources, originals, strict=False):
        node._rename(source.name)  # made unique where a subclass has become several
        node.target = node.name
        node.meta["val"] = value
        node.meta["dynamo"] = source
    for node, (name, value) in zip(nodes[len(sources) :], attributes.items(), strict=True):
        attribute = f"_attribute_{name.replace('.', '_')}"
        traced.register_buffer(attribute, value, persistent=False)
        with traced.graph.inserting_before(node):
            constant = traced.graph.get_attr(attribute)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant)
        traced.graph.erase_node(node)


def _end_with_copies(traced: fx.GraphModule, num_outputs: int, mutated: list[int]) -> None:
    """Turn the extra outputs (new values of mutated inputs) into ``copy_`` nodes at the end."""
    output = traced.graph.output_node()
    results, new_values = list(output.args[0])[:num_outputs], list(output.args[0])[num_outputs:]  # type: ignore[arg-type]
    placeholders = traced.graph.find_nodes(op="placeholder")
    with traced.graph.inserting_before(output):
        for i, value in zip(mutated, new_values, strict=True):
            copy = traced.graph.call_function(aten.copy_.default, (placeholders[i], value))
            copy.meta["val"] = placeholders[i].meta["val"]
    output.args = (tuple(results),)


def _shared_inputs(inputs: Sequence[Any], mutated: Sequence[int]) -> list[str]:
    """A write into one input must not be visible through another: the functional graph would miss it."""
    storages = {i: x.untyped_storage()._cdata for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    shared = [(i, j) for i in mutated for j, s in storages.items() if j != i and s == storages[i]]
    return [f"graph input {i} is written in place and shares memory with input {j}; pass clones" for i, j in shared]
