"""captrain: find the capabilities an LLM agent lacks, train one LoRA adapter for each, route tasks to them.

Implements TRACE (arXiv 2604.05336) as a cached, resumable pipeline. Data flows one way through the modules:
spec -> rollouts -> labels -> capabilities -> environments -> adapters -> routes -> evaluation -> figures.
Importing the package is cheap: torch and its friends are imported inside the functions that need them, and the loaders
of results (`captrain.load_main()`) when one is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from captrain.loaders import (
        load_adapters,
        load_capabilities,
        load_differences,
        load_history,
        load_kinds,
        load_labels,
        load_ledger,
        load_main,
        load_outcomes,
        load_passports,
        load_published,
        load_rollouts,
        load_routes,
        load_selection,
        load_spec,
    )

__version__ = "0.1.0"
__all__ = [
    "load_adapters",
    "load_capabilities",
    "load_differences",
    "load_history",
    "load_kinds",
    "load_labels",
    "load_ledger",
    "load_main",
    "load_outcomes",
    "load_passports",
    "load_published",
    "load_rollouts",
    "load_routes",
    "load_selection",
    "load_spec",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from captrain import loaders

    return getattr(loaders, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
