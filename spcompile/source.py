"""Where in the user's model a node comes from: for reports and errors."""

from __future__ import annotations

import inspect
import os
import re

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_NAMES = {"L", "G", "self", "fn", "__dict__", "_modules", "_orig_mod", "__nested_resume_fns", "__stack0"}
"""Words of Dynamo's module paths, as in L['self'].__dict__['_modules']['blocks'].0, that name no module."""
_TORCH = os.path.dirname(torch.__file__) + os.sep


def module_of(node: fx.Node) -> str:
    """The path of the innermost module, as in ``transformer_blocks.0.attn``; the node's name without one."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return node.name
    path, _ = list(stack.values())[-1]
    steps = re.findall(r"\w+", str(path))
    return ".".join(s for s in steps if s not in _NOT_NAMES) or node.name


def source_of(node: fx.Node) -> str:
    """``file:line`` in the model: the innermost frame in the file of the innermost module's class."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    if not frames:  # called by torch alone, as when the model is one of its own modules
        owners = [o for _, o in (node.meta.get("nn_module_stack") or {}).values() if isinstance(o, type)]
        return f"in torch's {owners[-1].__name__}" if owners else "unknown source"
    outside_torch = [f for f in frames if not f[0].startswith(_TORCH)] or frames
    for _, owner in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        file = _file_of(owner)
        inside = [f for f in outside_torch if f[0] == file]
        if inside:
            return ":".join(inside[-1])
    return ":".join(outside_torch[-1])


def _file_of(owner: object) -> str | None:
    if not isinstance(owner, type):
        return None
    try:
        return inspect.getsourcefile(owner)
    except TypeError:  # a class made on the fly has no file
        return None


def place(node: fx.Node) -> str:
    """One line for an error: module and source."""
    return f"{module_of(node)} ({source_of(node)})"
