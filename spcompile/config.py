"""What the user asked for, checked once and frozen."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spcompile.errors import SPConfigError
from spcompile.ops.kernels import KERNELS
from spcompile.ops.mesh import AXES

Mesh = tuple[int, int, int]
"""Degrees ``(ring, kv_gather, ulysses)``."""


@dataclass(frozen=True)
class Config:
    """One backend's options.

    ``degree`` is P, the number of ranks that share one sequence; None: the whole group. ``mesh`` are the degrees
    if they were given one by one, and then binding; None: chosen per attention site.
    """

    degree: int | None = None
    mesh: Mesh | None = None
    kernel: str = "auto"
    inner: str | Callable[..., Any] = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    min_tokens: int = 1
    dump: str | None = None
    check: str = "first"
    verify: str = "off"
    timeout: float | None = None
    cudagraphs: str = "off"
    max_recordings: int = 16


CHECKS = ("first", "always", "off")
VERIFIES = ("off", "first")
_LONGEST_S = 1e8
CUDAGRAPHS = ("off", "piecewise", "full")


def kernel_names() -> tuple[str, ...]:
    """What ``kernel=`` may be, from the declarations."""
    return ("auto", *KERNELS)


def make_config(
    sp: int | None,
    *,
    ulysses: int | None,
    ring: int | None,
    kv_gather: int | None,
    kernel: str,
    inner: str | Callable[..., Any],
    options: Mapping[str, Any] | None,
    strict: bool,
    min_tokens: int,
    dump: str | None,
    check: str = "first",
    verify: str = "off",
    timeout: float | None = None,
    cudagraphs: str = "off",
    max_recordings: int = 16,
) -> Config:
    """Check the options of `spcompile.backend`. Raises `SPConfigError` with what was given and what would fit."""
    degrees = {"ring": ring, "kv_gather": kv_gather, "ulysses": ulysses}
    for name, degree in {"sp": sp, **degrees}.items():
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise SPConfigError("SP101", f"{name}={degree!r}: a degree is a whole number of ranks, 1 or more")
    mesh = _mesh(sp, degrees)
    if kernel not in kernel_names():
        raise SPConfigError("SP103", f"kernel={kernel!r} is not known; choose one of {', '.join(kernel_names())}")
    if kernel != "auto" and (missing := KERNELS[kernel].missing()):
        raise SPConfigError("SP103", f"kernel={kernel!r}: {missing}")
    if isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 1:
        raise SPConfigError("SP104", f"min_tokens={min_tokens!r}: want a number of tokens, 1 or more")
    if not (isinstance(inner, str) or callable(inner)):
        raise SPConfigError("SP104", f"inner={inner!r}: want the name of a torch.compile backend, or a callable")
    choices = (("check", check, CHECKS), ("verify", verify, VERIFIES), ("cudagraphs", cudagraphs, CUDAGRAPHS))
    for name, value, allowed in choices:
        if value not in allowed:
            raise SPConfigError("SP104", f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
    if not isinstance(strict, bool):
        raise SPConfigError("SP104", f"strict={strict!r}: want True or False")
    if dump is not None and not isinstance(dump, (str, os.PathLike)):
        raise SPConfigError("SP104", f"dump={dump!r}: want a folder")
    if not isinstance(options or {}, Mapping):
        raise SPConfigError("SP104", f"options={options!r}: want a mapping, which goes to the inner compiler")
    seconds = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout <= _LONGEST_S
    if timeout is not None and not seconds:
        raise SPConfigError("SP104", f"timeout={timeout!r}: want seconds, more than 0 and at most 1e8")
    if isinstance(max_recordings, bool) or not isinstance(max_recordings, int) or max_recordings < 1:
        raise SPConfigError(
            "SP104", f"max_recordings={max_recordings!r}: want how often graphs may be recorded, 1 or more"
        )
    if cudagraphs != "off" and ((options or {}).get("triton.cudagraphs") or inner == "cudagraphs"):
        raise SPConfigError(
            "SP112",
            f"cudagraphs={cudagraphs!r}, and the inner compiler is to record CUDA graphs too: leave one of them out",
        )
    return Config(
        degree=sp if mesh is None else math.prod(mesh),
        mesh=mesh,
        kernel=kernel,
        inner=inner,
        options=dict(options or {}),
        strict=strict,
        min_tokens=min_tokens,
        dump=dump,
        check=check,
        verify=verify,
        timeout=timeout,
        cudagraphs=cudagraphs,
        max_recordings=max_recordings,
    )


def _mesh(sp: int | None, degrees: Mapping[str, int | None]) -> Mesh | None:
    """The degrees given one by one; those left out are 1. None if none was given."""
    given = {name: d for name, d in degrees.items() if d is not None}
    if not given:
        return None
    ring, kv_gather, ulysses = (given.get(axis, 1) for axis in AXES)
    product = ring * kv_gather * ulysses
    if sp is not None and sp != product:
        asked = ", ".join(f"{name}={d}" for name, d in given.items())
        rest, left = divmod(sp, product)
        fits = f"raise one of them {rest} times, or leave them out" if left == 0 else f"say sp={product}"
        makes = "is" if len(given) == 1 else "multiply to"
        raise SPConfigError("SP102", f"sp={sp}, but {asked} {makes} {product} ranks: {fits}")
    return ring, kv_gather, ulysses
