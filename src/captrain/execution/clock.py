"""Wall-clock and CPU seconds of each stage, in the run that made the results which lie here.

Times differ from run to run, so they are no part of any result and no output of any stage: they lie in the cache of
this checkout, each named by the digest of the results that it belongs to. A stage that was restored from the cache
keeps the time of the run that made it, if that was here; one that went on from a journal or checkpoint counts its last
part. CPU seconds include worker processes that have ended, and not the jobs of a cluster.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from captrain.records import digest, file_digest, publish_json, read_json

TIMES = Path(".cache/times")


@dataclass(frozen=True)
class Time:
    """Seconds of one stage."""

    wall_s: float
    cpu_s: float


@contextmanager
def timed(stage: str, results: Path = Path("results"), folder: Path = TIMES) -> Iterator[Callable[[], float]]:
    """Write down what the block takes, if it ends well and leaves results of that stage; the block is given what tells
    the seconds since it began."""
    wall, cpu = time.perf_counter(), _cpu()
    yield lambda: time.perf_counter() - wall
    if outputs := _outputs_digest(results, stage):
        duration = Time(round(time.perf_counter() - wall, 1), round(_cpu() - cpu, 1))
        publish_json(folder / stage / f"{outputs}.json", asdict(duration))


def times(root: Path) -> dict[str, Time]:
    """Read the time of each stage whose results here were made here."""
    stages = [folder.name for folder in sorted((root / TIMES).glob("*"))]
    paths = {stage: root / TIMES / stage / f"{_outputs_digest(root / 'results', stage)}.json" for stage in stages}
    return {stage: read_json(path, Time, f"remove {path}") for stage, path in paths.items() if path.exists()}


def _cpu() -> float:
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _outputs_digest(results: Path, stage: str) -> str:
    """Hash what the stage has left in `results`, "" for nothing."""
    alone = results / f"{stage}.json"
    files = sorted(path for path in (results / stage).rglob("*") if path.is_file())
    files += [alone] if alone.is_file() else []
    return digest([str(path.relative_to(results)) for path in files], file_digest(*files)) if files else ""
