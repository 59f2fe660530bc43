"""Gated delta rule (GDN) of Qwen models on NVIDIA Hopper: the op, its PyTorch reference, tools to verify and time it.

Public names load on first use, so that `import flashqla` needs neither a GPU nor torch.
"""

from typing import TYPE_CHECKING, Any

from flashqla._version import __version__

if TYPE_CHECKING:
    from flashqla.captures import capture
    from flashqla.ops import (
        FallbackWarning,
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_bwd,
        chunk_gated_delta_rule_fwd,
        explain,
        strict,
    )

__all__ = [
    "FallbackWarning",
    "__version__",
    "capture",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "explain",
    "strict",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashqla import captures, ops

    value = getattr(captures if name == "capture" else ops, name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
