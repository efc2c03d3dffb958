"""The stages in order, from Dynamo's graph to the graph that every rank runs."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from spcompile import ops
from spcompile.canonical import canonical, reads
from spcompile.capture import Captured, Subclasses, capture, retarget
from spcompile.config import Config, Mesh
from spcompile.dump import dump, dump_pieces, layouts, readable, trace
from spcompile.errors import UnshardedWarning, UnsupportedGraphError
from spcompile.exchanges import Policy
from spcompile.factors import infer_cheapest
from spcompile.handwritten import canonicalise_handwritten
from spcompile.infer import Inference, is_random
from spcompile.overlap import overlap
from spcompile.pieces import Partition, partition, texts
from spcompile.recognise import canonicalise
from spcompile.report import Report
from spcompile.rewrite import KEPT_META, Rewritten, rewrite
from spcompile.sites import Site, find_sites, may_be_attention, names_attention, weighs_values
from spcompile.source import place
from spcompile.verify import require_distributed, require_strict, verify

log = logging.getLogger("spcompile")

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Distributed:
    """The local graph as a module for the inner compiler, what was done, and the inputs it was made for.

    ``subclasses`` says how Dynamo's inputs become the module's. ``draws``: the graph draws random numbers.
    ``sends_from``: kinds of devices of what ranks exchange. ``partition`` cuts it for CUDA graphs, if they were asked
    for.
    """

    module: fx.GraphModule
    report: Report
    signature: str
    subclasses: Subclasses
    draws: bool
    sends_from: set[str]
    partition: Partition | None = None

    def compiled(
        self, compiler: Callable[..., Callable[..., Any]], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What ``compiler(module, inputs)`` makes of the module, as a function of Dynamo's inputs."""
        if not self.subclasses:
            return compiler(self.module, example_inputs)
        inner = compiler(self.module, self.subclasses.flat(example_inputs))
        return lambda *inputs: inner(*self.subclasses.flat(inputs))

    @property
    def meshes(self) -> set[Mesh]:
        """The meshes that exchanges of this graph go through."""
        return {tuple(n.args[-2]) for n in _exchanges(self.module.graph)}

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must agree on, by name."""
        return {"inputs": self.signature, "rewritten graph": self.digest}

    @cached_property
    def digest(self) -> str:
        """Of what the module computes: 15 hexadecimal digits."""
        return hashlib.sha256("\n".join(canonical(self.module)).encode()).hexdigest()[:15]

    def described(self) -> list[str]:
        """What the module computes, a line for each node, with its source."""
        return canonical(self.module, with_source=True)

    @property
    def inputs_read(self) -> list[int]:
        """Which of Dynamo's inputs the graph reads, by their places."""
        places = self.subclasses.of_each(range(len(self.subclasses.makers)))
        return sorted({i for i, read in zip(places, reads(self.module), strict=True) if read})


def distribute(
    dynamo: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    degree: int,
    group: str,
    index: int,
    device: str | None = None,
    graphs_on: str = "cuda",
) -> Distributed | None:
    """Run the stages on one Dynamo graph. None if it has no attention: such a graph is compiled as it is.

    ``device`` plans for another device than the inputs', without having one. ``graphs_on`` is the kind of device
    that records CUDA graphs.
    """
    if not names_attention(dynamo):
        return None
    if any(isinstance(x, torch.SymInt) and free_unbacked_symbols(x) for x in example_inputs):
        raise UnsupportedGraphError("SP203", f"an input was marked by mark_dynamic or mark_unbacked, {_STATIC}")
    try:
        captured = capture(dynamo, example_inputs)
    except UnsupportedGraphError:
        raise
    except Exception as error:
        raise UnsupportedGraphError(
            "SP201",
            f"a graph with attention cannot be traced before dispatch: {type(error).__name__}: {error}. "
            "Keep what fails here out of the graph that holds the attention: torch.compiler.disable its function",
        ) from error
    if device is not None:
        retarget(captured, device)
    recognised = canonicalise(captured) + canonicalise_handwritten(captured)
    sites = find_sites(captured.graph_module)
    log.info("capture: %d nodes, %d attention sites (%d recognised)", len(captured.graph.nodes), len(sites), recognised)
    if not sites:
        return None
    _require_inference(captured, sites, example_inputs)
    policy = Policy(degree, config.mesh, config.kernel, config.min_tokens, may_draw=config.check != "off")
    found, switched = infer_cheapest(captured.graph, sites, policy)
    log.info("infer: %d calls on chunks, %d on gathered values", len(found.plans), len(found.regathered))
    log.info("switch: %d sites move the cut to the batch and back", switched)
    _require_exact(sites, found)
    rewritten = rewrite(captured, sites, found, degree=degree, group=group)
    log.info("rewrite: %d nodes, %d collectives", len(rewritten.graph.nodes), rewritten.report.collectives)
    early = overlap(rewritten.graph)
    log.info("overlap: %d gathers start early", early)
    trace("captured", lambda: readable(captured.graph_module, captured.graph, "Captured"))
    trace("layouts", lambda: layouts(captured.graph, found, degree))
    trace("rewritten", lambda: readable(captured.graph_module, rewritten.graph, "Rewritten"))
    if config.dump:
        dump(config.dump, index, captured, found, rewritten, degree)
    verify(rewritten, captured.graph, sites, degree)
    require_distributed(sites, rewritten.report)
    if config.strict:
        require_strict(rewritten.report)
    pieces = None
    if config.cudagraphs != "off":
        pieces = partition(captured.graph_module, rewritten.graph, config.cudagraphs, graphs_on)
        log.info("pieces: %d parts, %d of them captured", len(pieces.parts), pieces.num_pieces)
        rewritten.report.pieces, rewritten.report.buffer_bytes = pieces.entries(), sum(pieces.slots)
        trace("pieces", lambda: "\n".join(texts(pieces)))
        if config.dump:
            dump_pieces(config.dump, index, "\n".join(texts(pieces)), rewritten.report)
    draws = any(map(is_random, captured.graph.nodes))
    sends_from = {x.meta["val"].device.type for n in _exchanges(rewritten.graph) for x in n.all_input_nodes}
    module, signature = _for_inner(captured, dynamo, rewritten), _signature(captured.graph)
    return Distributed(module, rewritten.report, signature, captured.subclasses, draws, sends_from, pieces)


def _exchanges(graph: fx.Graph) -> list[Any]:
    """Nodes of ops that know of ranks."""
    return [n for n in graph.nodes if n.target in ops.PROGRAMS]


def warn_of_unrecognised(dynamo: fx.GraphModule, strict: bool) -> None:
    """For a graph in which no attention was found: does it call something that may be part of one?

    Such a graph runs in full on every rank: right, and without the speed asked for.
    """
    found = [n for n in dynamo.graph.nodes if may_be_attention(n) and weighs_values(n)]
    if not found:
        return
    text = (
        f"{place(found[0])}: `{found[0].name}` may be part of attention, which is not recognised in this graph, so "
        "that all of it runs in full on every rank. Use scaled_dot_product_attention, or register_attention for an op "
        "of your own"
    )
    if strict:
        raise UnsupportedGraphError("SP211", f"strict=True, and {text}")
    warnings.warn(text, UnshardedWarning, stacklevel=2)


def _signature(graph: fx.Graph) -> str:
    """Shape, dtype and kind of device of every input that is read."""
    values = [n.meta["val"] for n in graph.find_nodes(op="placeholder") if n.users]
    return ", ".join(f"{list(v.shape)} {v.dtype} {v.device.type}" for v in values if isinstance(v, Tensor))


_STATIC = "and every resolution is compiled on its own; leave it out, or use torch._dynamo.maybe_mark_dynamic"


def _require_inference(captured: Captured, sites: Sequence[Site], example_inputs: Sequence[Any]) -> None:
    """Refuse what the stages below do not cover."""
    where = place(sites[0].node)
    if captured.refusals:
        raise UnsupportedGraphError("SP202", f"the graph around {where}: {'; '.join(captured.refusals)}")
    fixed = [i for i, x in enumerate(example_inputs) if getattr(x, "_dynamo_dynamic_indices", None)]
    if fixed:
        raise UnsupportedGraphError(
            "SP203",
            f"the graph around {where}: mark_dynamic was called on an input of shape "
            f"{list(example_inputs[fixed[0]].shape)}, {_STATIC}",
        )
    trains = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
    if trains:
        raise UnsupportedGraphError(
            "SP204",
            f"the graph around {where} is to be differentiated, and gradients are not available yet: "
            "call the model under torch.no_grad() or torch.inference_mode()",
        )


def _require_exact(sites: Sequence[Site], found: Inference) -> None:
    """Refuse sites for which no exact exchange exists."""
    refused = [(s, refusal) for s in sites if (refusal := found.sites[s.node].refusal)]
    if refused:
        more = f" ({len(refused) - 1} more sites like it)" if len(refused) > 1 else ""
        site, (code, why) = refused[0]
        shapes = ", ".join(f"{n} {list(site.shape(n))}" for n in ("q", "k", "v"))
        raise UnsupportedGraphError(code, f"{place(site.node)}: attention with {shapes}: {why}{more}")


def _for_inner(captured: Captured, dynamo: fx.GraphModule, rewritten: Rewritten) -> fx.GraphModule:
    """A module that the inner compiler takes for Dynamo's: same placeholders, parameters still static inputs."""
    for node in rewritten.graph.nodes:
        source = node.meta.get("dynamo")
        node.meta = {k: node.meta[k] for k in KEPT_META if k in node.meta}
        if source is not None:
            node.meta.update(source.meta)
            if hasattr(source, "_dynamo_source"):
                node._dynamo_source = source._dynamo_source
    module = fx.GraphModule(captured.graph_module, rewritten.graph, "spcompile")
    module.meta.update(dynamo.meta)
    if hasattr(dynamo, "_param_name_to_source"):  # AOTAutograd then wants the source of constants too
        constants = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        sources = {name: ConstantSource(f"spcompile constant {name}") for name in constants}
        of_dynamo: Any = dynamo._param_name_to_source
        module._param_name_to_source = sources | of_dynamo
    return module
