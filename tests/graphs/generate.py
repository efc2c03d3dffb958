"""Programs from seeds, and modules from programs."""

from __future__ import annotations

import contextlib
import linecache
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphs.program import HEADER, OPS, PRELUDE, Code, Inapplicable, Program, Rng, require


def generate(seed: int) -> Program:
    r = Rng(seed)
    heads, head_dim = r.choice([(1, 8), (2, 4), (2, 8), (3, 4), (4, 4), (4, 6), (5, 4), (6, 4), (7, 2), (8, 4), (9, 2),
                                (10, 4), (12, 4), (12, 2), (8, 2)])  # fmt: skip
    dtype = r.choices(["float32", "float64", "bfloat16"], [16, 3, 1])[0]
    program = Program(seed, r.choice([1, 1, 2, 2, 3]), heads, head_dim, dtype, draw_degrees(r), [])
    for _ in range(r.choice([1, 1, 2, 2, 2, 3])):
        program = extended(r, program, "stream")
        if r.random() < 0.5:
            program = extended(r, program, "position")
    names = [n for n in OPS if OPS[n].weight]
    weights = [OPS[n].weight for n in names]
    program = extended(r, program, r.choice(["self_attention", "self_attention", "joint_attention"]))
    if program.steps[-1]["op"] in ("stream", "position"):
        program = extended(r, program, "self_attention")
    for _ in range(r.choice([1, 2, 2, 3, 3, 4, 5, 7])):
        program = extended(r, program, r.choices(names, weights)[0])
    return extended(r, program, "output")


def extended(r: Rng, program: Program, name: str) -> Program:
    """With one more step; without it where no draw fits."""
    for _ in range(8):
        with contextlib.suppress(Inapplicable):
            step = {"op": name, **OPS[name].draw(r, Code(program) if program.steps else _Empty(program))}
            longer = replace(program, steps=[*program.steps, step])
            code = Code(longer)
            require(not (code.ordered and program.dtype == "bfloat16"))
            return longer
    return program


class _Empty(Code):
    """A program before its first stream."""

    def __init__(self, program: Program) -> None:
        super().__init__(replace(program, steps=[{"op": "stream", "name": "_", "kind": "linear", "size": [2]}]))
        self.tokens, self.grid = {}, {}


def draw_degrees(r: Rng) -> dict[str, int]:
    ranks = r.choice([2, 2, 3, 4, 4, 5, 6, 7, 8])
    if r.random() < 0.6:
        return {"sp": ranks}
    if r.random() < 0.6:
        return {r.choice(["ulysses", "kv_gather", "ring"]): ranks}
    first = r.choice([2, 2, 3, 4])
    a, b = r.sample(["ulysses", "kv_gather", "ring"], 2)
    return {a: first, b: 2}


def build(program: Program) -> tuple[torch.nn.Module, list[Tensor]]:
    """The module and its inputs, in the program's dtype."""
    code = Code(program)
    text = HEADER + PRELUDE + code.source()
    name = f"<program {program.seed} {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compile(text, name, "exec"), space)
    torch.manual_seed(0)
    model = space["Model"]().eval().requires_grad_(False)
    inputs = [eval(expression, {"torch": torch}) for expression in code.inputs.values()]
    return model, inputs
