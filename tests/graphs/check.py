"""A program against its own eager run, in every precision it has."""

from __future__ import annotations

import contextlib
import copy
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import spcompile
from graphs.generate import build
from graphs.program import Program
from spcompile.testing import simulate


@dataclass(frozen=True)
class Outcome:
    """``kind``: right, refused, skipped, or what is wrong."""

    kind: str
    detail: str = ""
    distributed: int = 0
    local: int = 0
    replicated: int = 0
    regathers: int = 0

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "refused", "skipped")


def check(program: Program, seconds: int = 60) -> Outcome:
    torch._dynamo.reset()
    dtype = getattr(torch, program.dtype)
    try:
        model, inputs = build(program)
        wide = model.double()
        exact = wide(*cast(inputs, torch.float64))
        rounded, given = model.to(dtype), cast(inputs, dtype)
        eager = rounded(*copy.deepcopy(given))
    except Exception as error:
        return Outcome("skipped", f"eager: {type(error).__name__}: {error}")
    try:
        with at_most(seconds):
            run = simulate(rounded, given, **program.degrees)
    except spcompile.SPError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome(f"crash {type(error).__name__}", f"{error}")
    exchanges = [entry.exchange for entry in run.report.attention]
    counts = {
        "local": exchanges.count("local"),
        "replicated": exchanges.count("replicated"),
        "distributed": len([e for e in exchanges if e not in ("local", "replicated")]),
        "regathers": len(run.report.regathers),
    }
    for rank, out in enumerate(run.outputs):
        kind, detail = compared(out, eager, exact)
        if kind == "wrong value" and dtype != torch.float64 and not check(replace(program, dtype="float64")).failed:
            return Outcome("skipped", f"rounding: {detail}", **counts)
        if kind != "right":
            return Outcome(kind, f"rank {rank}: {detail}", **counts)
    return Outcome("right", **counts)


def cast(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x.clone() for x in inputs]


def compared(out: Any, eager: Any, exact: Any) -> tuple[str, str]:
    leaves, tree = pytree.tree_flatten(out)
    wanted, shape = pytree.tree_flatten(eager)
    if tree != shape:
        return "structure", f"{tree}, not {shape}"
    for i, (a, b, best) in enumerate(zip(leaves, wanted, pytree.tree_leaves(exact), strict=True)):
        if not isinstance(b, Tensor):
            if a != b:
                return "structure", f"leaf {i}: {a!r}, not {b!r}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return "structure", f"leaf {i}: {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "wrong value", f"leaf {i}: {int((a != b).sum())} of {b.numel()} integers"
            continue
        best = best.double()
        scale, own = best.abs().max().item(), (b.double() - best).abs().max().item()
        if not math.isfinite(scale) or not math.isfinite(own):
            return "skipped", f"leaf {i} is not finite"
        eps = torch.finfo(b.dtype).eps
        if own > 1e4 * eps * scale:
            return "skipped", f"leaf {i}: chaotic, {own:.1e} of {scale:.1e}"
        slack = {torch.float32: 1e-5, torch.float64: 1e-10}.get(b.dtype, 16 * eps)
        error = (a.double() - b.double()).abs().max().item()
        if not error <= 4 * own + slack * scale:
            return "wrong value", f"leaf {i}: off by {error:.1e} of {scale:.1e}, own rounding {own:.1e}"
    return "right", ""


class Hang(Exception):
    """A run took too long."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
