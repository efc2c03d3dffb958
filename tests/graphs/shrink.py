"""Small programs that fail as large ones do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from graphs.check import check
from graphs.program import Code, Inapplicable, Program, Step

DEFAULTS = {
    "norm": "none", "mod": "none", "how": "sdpa", "project": "fused", "layout": "view", "qk": "none", "rope": "none",
    "mask": "none", "keys": "all", "merge": "flatten", "gqa": "flag", "dtype": "float64",
}  # fmt: skip


def shrink(program: Program, kind: str, runs: int = 60) -> Program:
    """A smaller program that fails the same way."""
    tried: set[str] = set()
    left = runs

    def fails(candidate: Program) -> bool:
        nonlocal left
        key = json.dumps(asdict(candidate), sort_keys=True)
        if left <= 0 or key in tried:
            return False
        tried.add(key)
        try:
            Code(candidate)
        except (Inapplicable, KeyError, ZeroDivisionError):
            return False
        left -= 1
        return check(candidate).kind == kind

    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate_of in (fewer_steps, simpler, smaller_sizes):
            again = True
            while again and left > 0:
                again = False
                for candidate in candidate_of(program):
                    if fails(candidate):
                        program, again, smaller = candidate, True, True
                        break
    return program


def fewer_steps(program: Program) -> Iterator[Program]:
    steps, n = program.steps, len(program.steps)
    for size in (n // 2, n // 4, 1):
        if size >= 1:
            for start in range(n - size, -1, -size):
                yield replace(program, steps=steps[:start] + steps[start + size :])
    for i, step in enumerate(steps):
        if step["op"] == "output" and len(step["parts"]) > 1:
            for part in step["parts"]:
                yield replace(program, steps=[*steps[:i], {**step, "parts": [part]}, *steps[i + 1 :]])


def simpler(program: Program) -> Iterator[Program]:
    """All options at their defaults, then one by one."""
    if program.dtype != "float64":
        yield replace(program, dtype="float64")
    for i, step in enumerate(program.steps):
        for group in ("attn", "pre"):
            if group not in step:
                continue
            options = step[group]
            plain = {k: DEFAULTS.get(k, v) for k, v in options.items()}
            if "kv_heads" in plain:
                plain["kv_heads"] = program.heads
            singles = [{**options, k: v} for k, v in plain.items() if options[k] != v]
            for changed in [plain, *singles] if len(singles) > 1 else singles:
                steps = [*program.steps[:i], {**step, group: changed}, *program.steps[i + 1 :]]
                yield replace(program, steps=steps)


def smaller_sizes(program: Program) -> Iterator[Program]:
    if program.ranks > 2 or "sp" not in program.degrees:
        yield replace(program, degrees={"sp": 2})
        yield replace(program, degrees={"sp": program.ranks})
        for name, n in program.degrees.items():
            yield replace(program, degrees={name: 2})
            yield replace(program, degrees={**program.degrees, name: max(1, n - 1)})
    for name in ("batch", "heads", "head_dim"):
        value = getattr(program, name)
        for less in {1 if name == "batch" else 2, value // 2}:
            if 0 < less < value and (name != "head_dim" or less % 2 == 0):
                changed = replace(program, **{name: less})
                yield replace(changed, steps=[with_kv_heads(s, program.heads, changed.heads) for s in program.steps])
    for i, step in enumerate(program.steps):
        for key, value in step.items():
            if key == "size":
                options = [[*value[:d], n, *value[d + 1 :]] for d in range(len(value)) for n in fewer(value[d])]
            elif isinstance(value, int):
                options = fewer(value)
            else:
                continue
            for less in options:
                yield replace(program, steps=[*program.steps[:i], {**step, key: less}, *program.steps[i + 1 :]])


def fewer(n: int) -> list[int]:
    return sorted({m for m in (1, 2, 3, n // 2, n - 1) if 0 < m < n})


def with_kv_heads(step: Step, before: int, after: int) -> Step:
    if "attn" not in step:
        return step
    kv = step["attn"]["kv_heads"]
    return {**step, "attn": {**step["attn"], "kv_heads": after if kv == before else 1}}
