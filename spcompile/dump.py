"""Stage files for people: the captured graph, its layouts, the rewritten graph, the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import fx
from torch._logging import trace_structured

from spcompile.call import tensor_of
from spcompile.capture import Captured
from spcompile.infer import Inference
from spcompile.layout import describe
from spcompile.report import Report
from spcompile.rewrite import Rewritten
from spcompile.source import module_of


def dump(folder: str, index: int, captured: Captured, found: Inference, rewritten: Rewritten, degree: int) -> None:
    """Write ``folder/graph<index>/``. All ranks hold the same graph, so rank 0 writes."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    target = Path(folder) / f"graph{index}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "captured.py").write_text(readable(captured.graph_module, captured.graph, "Captured"))
    (target / "layouts.txt").write_text(layouts(captured.graph, found, degree))
    (target / "rewritten.py").write_text(readable(captured.graph_module, rewritten.graph, "Rewritten"))
    (target / "report.txt").write_text(f"{rewritten.report}\n")


def dump_pieces(folder: str, index: int, text: str, report: Report) -> None:
    """Add ``pieces.py``: what is captured and what is not, part by part. The report then has them too."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    target = Path(folder) / f"graph{index}"
    (target / "pieces.py").write_text(text)
    (target / "report.txt").write_text(f"{report}\n")


def trace(name: str, text: Callable[[], str]) -> None:
    """Hand a stage's text to torch's structured trace (``TORCH_TRACE``), where tlparse shows it."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"spcompile_{name}", "encoding": "string"}, payload_fn=text
    )


def readable(root: fx.GraphModule, graph: fx.Graph, name: str) -> str:
    """The graph as Python, with shapes and source lines."""
    module = fx.GraphModule(root, graph, name)
    return module.print_readable(print_output=False, include_stride=True) + "\n"


def layouts(graph: fx.Graph, found: Inference, degree: int) -> str:
    """One line per value: name, op, dims with the token dim as ``(512 + 4096)/2``, module."""
    lines = [
        f"# {degree} ranks. (512 + 4096)/2: two segments of tokens, each cut into 2 chunks; all else is on every rank."
    ]
    for node in graph.nodes:
        value, layout = tensor_of(node), found.layouts.get(node)
        if value is None or isinstance(layout, tuple) or layout is None:
            continue
        plan = found.sites.get(node)
        notes = [module_of(node)] + ([f"<- {plan.exchange}"] if plan else [])
        notes += [f"<- regather: {found.regathered[node]}"] if node in found.regathered else []
        what = str(node.target) if node.op == "call_function" else node.op
        lines.append(f"{node.name:32} {describe(layout, value.shape, degree):44} {what:44} {'  '.join(notes)}")
    return "\n".join(lines) + "\n"
