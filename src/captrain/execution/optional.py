"""The light installation: what `pip install captrain` leaves out, and which extra brings it.

Logs are diagnosed, results read and runs planned without torch, and the packages that only training, drawing and DVC
need are ten times as large as the rest. Where something of the kind is missing, one message names the extra
(`captrain.execution.entry_point`); what is a complement of an answer, such as a figure, is left out and said so.
"""

from importlib.util import find_spec

from captrain.errors import UserError

EXTRAS = {
    **dict.fromkeys(("submitit", "hydra_plugins"), "slurm"),
    **dict.fromkeys(("accelerate", "datasets", "peft", "safetensors", "tokenizers", "torch", "transformers"), "train"),
    **dict.fromkeys(
        ("deepdiff", "dvc", "fastapi", "gepa", "krippendorff", "matplotlib", "networkx", "openai"), "train"
    ),
    **dict.fromkeys(("openai", "ruamel", "scipy", "seaborn", "sklearn", "statsmodels", "tenacity"), "train"),
    **dict.fromkeys(("httpx2", "huggingface_hub", "trl", "uvicorn"), "train"),
    "sqlalchemy": "awm",
    "zstandard": "inspect",
}
"""Modules that the light installation lacks, each with the extra that it comes with."""
DRAWING = "seaborn"
COMPUTING = "scipy"


def has_package(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(module) is not None


def light_installation(error: ModuleNotFoundError) -> UserError | None:
    """Name the extra of a package that the light installation lacks; None of any other module, which is a bug."""
    package = str(error.name).partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    return UserError(
        f"this needs {package}, which the light installation leaves out", f"pip install 'captrain[{extra}]'"
    )
