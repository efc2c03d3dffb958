"""Stage 9: hand a graph to the inner compiler."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.exc import InvalidBackend

from spcompile import ops
from spcompile.config import Config
from spcompile.errors import SPConfigError


def compile_inner(config: Config, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile with ``config.inner`` and its options."""
    inputs = list(example_inputs)
    caching: Any = torch.compiler.config
    with caching.patch(cache_key_tag=f"{caching.cache_key_tag}spcompile-{fingerprint()}"):
        return _compile(config, module, inputs)


@functools.cache
def fingerprint() -> str:
    """A digest of the ops' source. Compile caches know a custom op by its name only; this tells versions apart."""
    folder = Path(ops.__file__).parent
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))).hexdigest()[:16]


def _compile(config: Config, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    if config.inner == "inductor":
        from torch._inductor import list_options
        from torch._inductor.compile_fx import compile_fx  # late: it is large, and other inners need none of it

        options = dict(config.options)
        if options.get("triton.cudagraphs"):
            given = options.get("custom_should_partition_ops", [])
            options["custom_should_partition_ops"] = [*given, *_not_capturable(module)]
        unknown = [name for name in config.options if name.replace("-", "_") not in list_options()]
        if unknown:
            raise SPConfigError("SP104", f"options: Inductor has none of the name {', '.join(unknown)}")
        compiled: Any = compile_fx(module, inputs, config_patches=options or None)
        return compiled
    compiler = config.inner if callable(config.inner) else _lookup(config.inner)
    options = {"options": dict(config.options)} if config.options else {}
    return compiler(module, inputs, **options)


def _not_capturable(module: fx.GraphModule) -> list[str]:
    """Names of our ops in the graph that Inductor must keep out of the CUDA graphs that it records itself."""
    names = set()
    for node in module.graph.nodes:
        declared = ops.DECLARED.get(node.target)
        if declared is not None:
            stays_out = declared.exchanges(node.args) and not ops.wire.is_capturable(str(node.args[-1]))
            if stays_out or declared.hindrance(node.args):
                names.add(node.target.name())
    return sorted(names)


def _lookup(name: str) -> Callable[..., Any]:
    try:
        return lookup_backend(name)
    except InvalidBackend as error:
        raise SPConfigError("SP105", f"inner={name!r} is no torch.compile backend: {error}") from None
