"""What a random program is: plain data, and the source of the module that it stands for.

Shapes: B batch, S tokens, T keys, C = H * D channels, grid frames x height x width."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]
Rng = random.Random


@dataclass(frozen=True)
class Program:
    seed: int
    batch: int
    heads: int
    head_dim: int
    dtype: str
    degrees: dict[str, int]
    steps: list[Step]

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())


class Inapplicable(Exception):
    """A step cannot follow the steps before it."""


def require(condition: object) -> None:
    if not condition:
        raise Inapplicable


class Code:
    """The module that a program describes, as text, and what is known of its streams after the steps so far."""

    def __init__(self, program: Program) -> None:
        self.B, self.H, self.D, self.C = (
            program.batch, program.heads, program.head_dim, program.heads * program.head_dim
        )  # fmt: skip
        self.init: list[str] = []
        self.body: list[str] = []
        self.inputs: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.grid: dict[str, tuple[int, int, int]] = {}
        self.saved: dict[str, int] = {}
        self.known: dict[str, str] = {}
        self.ordered = False  # order of values decides: not in bfloat16, where ties are common
        self.returned: str | None = None
        self.count = 0
        for step in program.steps:
            OPS[step["op"]].emit(self, **{k: v for k, v in step.items() if k != "op"})
            require(all(1 <= n <= 96 for n in self.tokens.values()) and self.tokens)

    def __call__(self, *lines: str) -> None:
        require(self.returned is None)
        self.body += lines

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def let(self, stem: str, expression: str) -> str:
        name = self.fresh(stem)
        self(f"{name} = {expression}")
        return name

    def module(self, expression: str) -> str:
        name = f"self.m{len(self.init)}"
        self.init.append(f"{name} = {expression}")
        return name

    def linear(self, inside: int | None = None, out: int | None = None) -> str:
        return self.module(f"nn.Linear({inside or self.C}, {out or self.C})")

    def param(self, *shape: int, scale: float = 0.3) -> str:
        return self.module(f"nn.Parameter({scale} * torch.randn({', '.join(map(str, shape))}))")

    def given(self, stem: str, expression: str) -> str:
        name = self.fresh(stem)
        self.inputs[name] = expression
        return name

    def randn(self, stem: str, *shape: int) -> str:
        return self.given(stem, f"torch.randn({', '.join(map(str, shape))})")

    def once(self, key: str, make: Callable[[], str]) -> str:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def size(self, x: str) -> int:
        require(x in self.tokens)
        return self.tokens[x]

    def cells(self, x: str) -> tuple[int, int, int]:
        require(x in self.grid and math.prod(self.grid[x]) == self.size(x))
        return self.grid[x]

    def resize(self, x: str, tokens: int, grid: tuple[int, int, int] | None = None) -> None:
        self.tokens[x] = tokens
        self.grid.pop(x, None)
        if grid is not None:
            self.grid[x] = grid

    def cond(self) -> str:
        """A conditioning vector [B, C] of a timestep."""

        def make() -> str:
            t, half = self.given("t", f"torch.rand({self.B})"), self.C // 2
            a = self.let("a", f"{t}[:, None] * torch.arange(1, {half + 1}, device={t}.device)")
            return self.let("c", f"F.silu({self.linear(2 * half)}(torch.cat([{a}.sin(), {a}.cos()], -1)))")

        return self.once("cond", make)

    def source(self) -> str:
        body = [*self.body, f"return {self.returned or '(' + ', '.join(self.tokens) + ',)'}"]
        indent = "\n        "
        return (
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()"
            + "".join(indent + line for line in self.init)
            + f"\n\n    def forward(self, {', '.join(self.inputs)}):"
            + "".join(indent + line for line in body)
            + "\n"
        )


PRELUDE = '''def angles(x, tokens, channels):
    """[tokens, channels // 2]"""
    rates = 1 / torch.arange(1, channels // 2 + 1, device=x.device).to(x.dtype)
    return torch.arange(tokens, device=x.device).to(x.dtype)[:, None] * rates


def turn_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def turn_pairs(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def turn_complex(x, turns):
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


'''

HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


def script(program: Program) -> str:
    """The program as a file that can be run: it prints each rank's largest error."""
    code = Code(program)
    options = ", ".join(f"{k}={v}" for k, v in program.degrees.items())
    cast = "" if program.dtype == "float32" else f".to(torch.{program.dtype})"
    inputs = "".join(f"    {expression},  # {name}\n" for name, expression in code.inputs.items())
    lines = [
        "torch.manual_seed(0)",
        f"model = Model(){cast}.requires_grad_(False)",
        f"inputs = [\n{inputs}]",
        *([f"inputs = [x{cast} if x.is_floating_point() else x for x in inputs]"] if cast else []),
        "want = torch.utils._pytree.tree_leaves(model(*copy.deepcopy(inputs)))",
        f"for out in simulate(model, inputs, {options}).outputs:",
        "    for a, b in zip(torch.utils._pytree.tree_leaves(out), want):",
        "        print(a.shape, b.shape, (a.double() - b.double()).abs().max().item() if a.shape == b.shape else None)",
    ]
    header = "import copy\n\n" + HEADER.replace("nn\n\n\n", "nn\n\nfrom spcompile.testing import simulate\n\n\n")
    helpers = [f for f in PRELUDE.split("\n\n\n") if f and f[4 : f.index("(")] in code.source()]
    return header + "\n\n\n".join([*helpers, code.source()]) + "\n\n" + "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Op:
    emit: Callable[..., None]
    draw: Callable[[Rng, Code], Step]
    weight: float


OPS: dict[str, Op] = {}


def op(weight: float, draw: Callable[[Rng, Code], Step]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a step: ``draw`` picks its parameters, the function writes its lines."""

    def register(emit: Callable[..., None]) -> Callable[..., None]:
        OPS[emit.__name__] = Op(emit, draw, weight)
        return emit

    return register


def one(r: Rng, w: Code) -> Step:
    return {"x": r.choice(list(w.tokens))}


def two(r: Rng, w: Code) -> Step:
    require(len(w.tokens) > 1)
    x, y = r.sample(list(w.tokens), 2)
    return {"x": x, "y": y}


def kinds(*values: Any, base: Callable[[Rng, Code], Step] = one, **others: Any) -> Callable[[Rng, Code], Step]:
    """Draws ``kind`` from ``values``, and every other parameter from its own."""
    return lambda r, w: {**base(r, w), "kind": r.choice(values), **{k: r.choice(v) for k, v in others.items()}}
