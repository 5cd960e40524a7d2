"""Versions of the libraries that compute, against those that results were made with, and the processor.

requirements.lock pins the environment that the committed results were made in. Of libraries only those count that
compute; another version of a progress bar is no reason for another number. Nothing here imports any of them.
"""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

COMPUTING = (
    *("accelerate", "datasets", "gepa", "krippendorff", "matplotlib", "networkx", "numpy", "pandas", "peft", "pillow"),
    *("python", "safetensors", "scikit-learn", "scipy", "seaborn", "statsmodels", "tokenizers", "torch"),
    *("transformers", "trl"),
)
"""Packages whose versions decide bytes of results or figures."""
CPUINFO = Path("/proc/cpuinfo")
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}
AVX2 = {"avx2", "fma"}
"""The flags by which torch chooses its vector kernels."""
SWITCHES = ("ATEN_CPU_CAPABILITY", "BLIS_", "DNNL_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_")
"""Prefixes of the variables that choose kernels of torch, numpy and BLAS, or how many threads share a sum."""
PROMISE = "every trained weight and every result of the embedded default has the same bytes on any x86-64 CPU with AVX2"


@dataclass(frozen=True)
class Libraries:
    """Installed versions against pinned ones: those that differ, as (pinned, installed), of libraries that compute and
    of `tools`, which decide no result."""

    pinned: int
    computing: Mapping[str, tuple[str, str]]
    tools: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Processor:
    """The processor here: architecture as the kernel calls it, model, widest vector instructions that torch uses
    ("" where unknown), and the switches of the environment that choose kernels."""

    architecture: str
    model: str
    vectors: str
    switches: tuple[str, ...]

    @property
    def exclusion(self) -> str:
        """Reason why the promise does not cover this processor, "" where it does."""
        if self.architecture in ("aarch64", "arm64"):
            return "arm64 is designed for and was not measured"
        if self.architecture not in ("x86_64", "AMD64"):
            return f"{self.architecture} was not measured"
        return "" if self.vectors else "AVX2 was not found here"

    def __str__(self) -> str:
        kind = f"{self.architecture} with {self.vectors}" if self.vectors else self.architecture
        switches = f"; set here: {', '.join(self.switches)}" if self.switches else ""
        return ", ".join(filter(None, (self.model, kind))) + switches


def compare_libraries(pins: str) -> Libraries:
    """Compare the installed versions with those that a requirements file pins, and Python's with the one it is for.

    Args:
        pins: text of the file, `name==version` a line; a comment may say `Python 3.11`. Of a wheel's build (`+cpu`)
            only what is pinned counts.
    """
    # Versions of pip's metadata: importing the libraries would take seconds.
    installed = {_plain(package.metadata["Name"]): package.version for package in distributions()}
    changed: dict[str, tuple[str, str]] = {}
    versions = re.findall(r"^([\w.-]+)==([^\s;#]+)", pins, re.MULTILINE)
    if match := re.search(r"^#.*\bPython (\d+\.\d+)", pins, re.MULTILINE):
        expected, actual = match[1], platform.python_version()
        if not f"{actual}.".startswith(f"{expected}."):
            changed["python"] = (expected, actual)
    for name, version in versions:
        actual = installed.get(_plain(name), "not installed")
        if version not in (actual, actual.partition("+")[0]):
            changed[_plain(name)] = (version, actual)
    computing = {name: pair for name, pair in changed.items() if name in COMPUTING}
    return Libraries(len(versions), computing, {name: pair for name, pair in changed.items() if name not in computing})


def _plain(name: str) -> str:
    """Write the name of a distribution as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def processor() -> Processor:
    """Read the processor of this machine, and the switches of this environment."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set[str]()
    vectors = "AVX-512" if present >= AVX512 else "AVX2" if present >= AVX2 else ""
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    # One thread is what the Makefile sets.
    switches = [switch for switch in switches if switch != "OMP_NUM_THREADS=1"]
    return Processor(platform.machine(), model[1] if model else "", vectors, tuple(switches))
