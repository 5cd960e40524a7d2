"""A campaign of faults. Run by `make faults FAULTS=20`.

The pipeline of `experiment=smoke` runs once undisturbed. Then it runs again from nothing, with random faults, and is
restarted after each one until it is complete. Its results/, artifacts/ and dvc.lock must be the same bytes. The script
prints a line per pipeline. At the end, or after SIGINT, SIGTERM or `--seconds`, it prints a row per kind of fault and
how often each stage was hit. The exit status is 1 if a byte differs, one of our tracebacks appears instead of a
message, a half-written file stayed, a pipeline was not resumed, or no pipeline was completed.

Each pipeline has a copy of git's files and its own DVC cache, so that nothing is restored.
"""

import argparse
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from captrain.projects import remove_cut_off

WORK = Path(".cache/faults")
POLL = 0.1
COMPARED = ("results", "artifacts", "dvc.lock")
"""What must come out the same."""
LIMITS: Mapping[str, tuple[int, Sequence[int]]] = {
    "files may not grow (ulimit -f)": (resource.RLIMIT_FSIZE, (1 << 10, 1 << 16, 1 << 20)),
    "few open files (ulimit -n)": (resource.RLIMIT_NOFILE, (24, 48, 96)),
}
"""Limits that last for a whole run, and the values drawn."""
SIGNALS: Mapping[str, tuple[signal.Signals, bool]] = {
    "SIGKILL to all": (signal.SIGKILL, True),
    "SIGTERM to all": (signal.SIGTERM, True),
    "SIGINT to all": (signal.SIGINT, True),
    "SIGKILL to the stage": (signal.SIGKILL, False),
}
"""Signals, and whether they go to the whole pipeline or only to its stage."""


class NotResumedError(Exception):
    """A restarted pipeline failed by itself."""


class Stopped(BaseException):  # noqa: N818  (no error)
    """Ends the campaign early; its outcomes so far are printed."""


@dataclass
class Campaign:
    """Outcomes of all faults so far: how often each kind was made, the stages at work, the pipelines completed
    afterwards, the files that differ, half-written files, and ends of logs with a traceback or of pipelines that
    were not resumed."""

    faults: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    pipelines: int = 0
    differing: Counter[str] = field(default_factory=Counter)
    remains: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """List everything that must not happen and did."""
        return [*self.failures, *self.differing, *self.remains, *self.tracebacks]

    def __str__(self) -> str:
        words = f"{self.pipelines} pipelines whole after {self.faults.total()} faults; {len(self.differing)} files "
        words += f"differ, {len(self.remains)} half-written files stayed, {len(self.tracebacks)} tracebacks"
        return f"{words}, {len(self.failures)} not resumed"


def prepare(folder: Path, overrides: Sequence[str]) -> Path:
    """Copy git's files without results and select the smoke experiment."""
    shutil.rmtree(folder, ignore_errors=True)
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, encoding="utf-8", check=True).stdout
    for name in filter(None, listing.split("\0")):
        if not name.startswith("results/") and name != "dvc.lock" and Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, folder / name)
    (folder / ".dvc/config.local").write_text("[core]\n    no_scm = true\n", encoding="utf-8")
    choice = {"experiment": "smoke", "seed": 0, "overrides": [*overrides]}
    (folder / "params.yaml").write_text(yaml.safe_dump(choice), encoding="utf-8")
    return folder


@contextmanager
def started(folder: Path, targets: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start the pipeline in its own session, with its output in log.txt; stop it when the campaign stops."""
    env = {**os.environ, "PYTHONPATH": str((folder / "src").resolve()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    # Python 3.11 keeps a .pyc file that a limit cut off, and cannot read it later. That is not tested here.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    remove_cut_off(folder)  # as `captrain run` does
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            ["dvc", "repro", *targets],
            cwd=folder,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def begun(folder: Path) -> list[str]:
    """List the stages that the pipeline has started since its last start, in order."""
    return re.findall(r"Running stage '(\w+)'", (folder / "log.txt").read_text(errors="replace", encoding="utf-8"))


def stage_times(process: "subprocess.Popen[str]", folder: Path) -> dict[str, float]:
    """Run a pipeline to its end and return the seconds of each stage, in order."""
    beginnings = dict[str, float]()
    while process.poll() is None:
        for stage in begun(folder):
            beginnings.setdefault(stage, time.monotonic())
        time.sleep(POLL)
    return {
        stage: end - start
        for (stage, start), end in zip(beginnings.items(), [*beginnings.values()][1:] + [time.monotonic()], strict=True)
    }


def disturb(
    process: "subprocess.Popen[str]", folder: Path, name: str, stages: Sequence[str], delay: float, draw: random.Random
) -> bool:
    """Make a fault some seconds after one of these stages started, or after a later one if the first is complete.

    Then wait until the pipeline has ended, or has gone on without the stage if the limit did not hurt it. Return
    whether the pipeline was still running.

    Raises:
        NotResumedError: it had failed by itself.
    """
    while {*stages}.isdisjoint(begun(folder)) and process.poll() is None:
        time.sleep(POLL)
    try:
        if process.wait(delay):
            raise _not_resumed(folder)
        return False
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid).children(recursive=True)
    number, whole_family = SIGNALS.get(name, (None, False))
    # The stage is the first process that DVC has started. Limits apply to the stages only: DVC's own lock
    # (.dvc/tmp/rwlock), cut off by a limit, has to be removed by hand.
    victims = [psutil.Process(process.pid), *family] if whole_family else family[:1] if number else family
    kind, values = LIMITS.get(name, (0, (0,)))
    value, stage = draw.choice(values), begun(folder)[-1:]
    for victim in victims:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if number is None:
                most = resource.prlimit(victim.pid, kind)[1]
                # A process of the sandbox may have less.
                least = value if most == resource.RLIM_INFINITY else min(value, most)
                resource.prlimit(victim.pid, kind, (least, most))
            else:
                victim.send_signal(number)
    while process.poll() is None and (number is not None or begun(folder)[-1:] == stage):
        time.sleep(POLL)
    return True


def contents(folder: Path) -> dict[str, str]:
    """Hash every file that must come out the same."""
    roots = [folder / name for name in COMPARED]
    files = [path for root in roots for path in (root, *sorted(root.rglob("*"))) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def hurt(
    folder: Path,
    targets: Sequence[str],
    times: Mapping[str, float],
    draw: random.Random,
    count: int,
    campaign: Campaign,
) -> None:
    """Run one pipeline with at most `count` faults until it is complete.

    Each fault comes at a random moment of its stage's undisturbed duration, in a stage that is not complete, and not so
    late that the remaining faults would find none.

    Raises:
        NotResumedError: it failed although nothing disturbed it any more.
    """
    order, number, name = [*times], 0, ""
    stages = order
    while number < count:
        with started(folder, targets) as process:
            while number < count and process.poll() is None:
                reach = max(1, 2 * len(stages) // (count - number))
                name, stage = draw.choice([*SIGNALS, *LIMITS]), draw.choice(stages[:reach])
                later, delay = stages[stages.index(stage) :], draw.uniform(0, times[stage])
                if not disturb(process, folder, name, later, delay, draw):
                    return
                campaign.faults[name], number = campaign.faults[name] + 1, number + 1
                [stage] = begun(folder)[-1:] or [""]
                campaign.stages[stage] += 1
                stages = order[order.index(stage) :] if stage else stages
            if process.wait() == 0:
                return
        log = (folder / "log.txt").read_text(errors="replace", encoding="utf-8")
        # DVC's own messages are not ours. The stages' messages are. A process ended by a signal says nothing.
        if name in LIMITS and "Traceback" in log and "stages/" in log.split("Traceback")[1][:2000]:
            campaign.tracebacks.append(log[-400:])
    with started(folder, targets) as process:
        if process.wait():
            raise _not_resumed(folder)


def _not_resumed(folder: Path) -> NotResumedError:
    return NotResumedError(
        f"{folder} was not resumed:\n{(folder / 'log.txt').read_text(errors='replace', encoding='utf-8')[-2000:]}"
    )


def make_faults(campaign: Campaign, options: argparse.Namespace) -> None:
    """Run the pipeline undisturbed, then with faults until enough were made; print a line per pipeline."""
    draw, reference = random.Random(options.seed), prepare(WORK / "undisturbed", options.overrides)
    with started(reference, options.targets) as process:
        times = stage_times(process, reference)
        if process.wait():
            raise SystemExit(
                f"the undisturbed run failed:\n{(reference / 'log.txt').read_text(encoding='utf-8')[-2000:]}"
            )
    expected = contents(reference)
    print(f"{len(expected)} files of the undisturbed run to compare with", flush=True)
    while campaign.faults.total() < options.faults:
        folder = prepare(WORK / f"disturbed-{campaign.pipelines + len(campaign.failures)}", options.overrides)
        try:
            hurt(
                folder,
                options.targets,
                times,
                draw,
                min(options.length, options.faults - campaign.faults.total()),
                campaign,
            )
            content = contents(folder)
            campaign.pipelines += 1
            campaign.differing.update(name for name in {*expected, *content} if expected.get(name) != content.get(name))
            # Half-written files that nobody will complete.
            remains = (path.relative_to(folder) for path in folder.rglob(".*.tmp"))
            campaign.remains += sorted(str(path) for path in remains if ".dvc" not in path.parts)
            shutil.rmtree(folder)
        except NotResumedError as error:  # keep its folder for inspection
            campaign.failures.append(str(error))
        print(campaign, flush=True)


def stop(number: int, _: object) -> None:
    """Stop the campaign at a signal; a second signal stops it without a table.

    Raises:
        Stopped: always.
    """
    for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(caught, signal.SIG_DFL)
    raise Stopped(signal.Signals(number).name)


def main() -> int:
    """Parse the command line, run the campaign, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="how many are made in all")
    parser.add_argument("--length", type=int, default=8, help="at most so many in one pipeline")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which it ends; 0: when all are made")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments")
    parser.add_argument("--targets", nargs="*", default=[], help="stages; none: the whole pipeline")
    parser.add_argument("--overrides", nargs="*", default=[], help="settings on top of the experiment")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, options.seconds)
    campaign, beginning, end = Campaign(), time.monotonic(), ""
    try:
        make_faults(campaign, options)
    except Stopped as signalled:
        end = f", stopped by {'--seconds' if str(signalled) == 'SIGALRM' else signalled}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - beginning
    print(f"{campaign.faults.total()} faults, seed {options.seed}, {seconds:.0f} s{end}")
    print(*(f"{name}: {count}" for name, count in sorted(campaign.faults.items())), sep="\n")
    print("hit: " + ", ".join(f"{stage or 'no stage yet'} {count}" for stage, count in campaign.stages.most_common()))
    print(campaign, *campaign.complaints[:20], sep="\n")
    return int(bool(campaign.complaints) or not campaign.pipelines)


if __name__ == "__main__":
    sys.exit(main())
