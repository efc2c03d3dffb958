"""What spcompile raises: at compile time, before any rank has computed anything, or when ranks first compare values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import ShortenTraceback


class SPError(Exception):
    """Base of everything spcompile refuses. The text says where, what was found, why, and what would work."""


class SPConfigError(SPError, ValueError):
    """The degrees, the mesh or an option cannot be right, whatever the model."""


class UnsupportedGraphError(SPError, RuntimeError):
    """The model's graph cannot be computed exactly with the degrees asked for."""


class RankMismatchError(SPError, RuntimeError):
    """The ranks do not hold the same graph, so their collectives would not match."""


class VerificationError(SPError, RuntimeError):
    """With ``verify="first"``: what the ranks computed is not what the unsharded graph gives."""


class RegatherWarning(UserWarning):
    """An op needs all tokens on every rank: an all-gather that costs speed, once per graph."""


class RecompileLimitWarning(UserWarning):
    """Dynamo is about to give up compiling; what follows runs unsharded on every rank."""


class UnshardedWarning(UserWarning):
    """A refusal that Dynamo was told to suppress: the code runs as it is, in full on this rank."""


@contextmanager
def through_dynamo() -> Iterator[None]:
    """Let an `SPError` leave torch.compile as it is; Dynamo wraps all others in ``BackendCompilerFailed``.

    Where Dynamo is told to run what it cannot compile, nothing leaves it: then a warning says what happens.
    """
    try:
        yield
    except Exception as error:
        if torch._dynamo.config.suppress_errors:
            warnings.warn(
                "torch._dynamo.config.suppress_errors is set: this code runs as it is, in full on this rank, instead "
                f"of raising {type(error).__name__}: {error}",
                UnshardedWarning,
                stacklevel=2,
            )
        if isinstance(error, ShortenTraceback) or not isinstance(error, SPError):
            raise
        kind = type(error)
        members = {"__module__": kind.__module__, "__init__": _as_dynamos}
        raise type(kind.__name__, (kind, ShortenTraceback), members)(str(error)) from error.__cause__


def _as_dynamos(self: ShortenTraceback, text: str) -> None:
    ShortenTraceback.__init__(self, text, first_useful_frame=None)
