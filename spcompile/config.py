"""What the user asked for, checked once and frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spcompile.errors import SPConfigError

KERNELS = ("auto",)


@dataclass(frozen=True)
class Config:
    """One backend's options. ``degree`` is P, the number of ranks that share one sequence; None: the whole group."""

    degree: int | None = None
    kernel: str = "auto"
    inner: str | Callable[..., Any] = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    min_tokens: int = 1
    dump: str | None = None


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
) -> Config:
    """Check the options of `spcompile.backend`. Raises `SPConfigError` with what was given and what would fit."""
    for name, degree in (("sp", sp), ("ulysses", ulysses), ("ring", ring), ("kv_gather", kv_gather)):
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise SPConfigError(f"{name}={degree!r}: a degree is a whole number of ranks, 1 or more")
    for name, degree in (("ring", ring), ("kv_gather", kv_gather)):
        if degree not in (None, 1):
            raise SPConfigError(f"{name}={degree}: the {name} exchange is not available yet; use ulysses={degree}")
    if sp is not None and ulysses is not None and sp != ulysses:
        raise SPConfigError(
            f"sp={sp} but ulysses={ulysses}: the degrees must multiply to sp; leave one out, or say ulysses={sp}"
        )
    if kernel not in KERNELS:
        raise SPConfigError(f"kernel={kernel!r} is not available; choose one of {', '.join(KERNELS)}")
    if not isinstance(min_tokens, int) or min_tokens < 1:
        raise SPConfigError(f"min_tokens={min_tokens!r}: want a number of tokens, 1 or more")
    if not (isinstance(inner, str) or callable(inner)):
        raise SPConfigError(f"inner={inner!r}: want the name of a torch.compile backend, or a callable")
    return Config(
        degree=sp if sp is not None else ulysses,
        kernel=kernel,
        inner=inner,
        options=dict(options or {}),
        strict=strict,
        min_tokens=min_tokens,
        dump=dump,
    )
