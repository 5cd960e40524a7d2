"""`captrain-sweep` on a pipeline of quick stages, with the real Hydra, launchers and DVC."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from support.cluster.slurm import Cluster, running
from support.letters import LETTERS
from support.results import account
from support.scripts import load_script
from support.training import inside, job
from support.waiting import PATIENCE, alive, until
from support.warm import EXECUTABLE, warm_commands

from captrain.comparison import point_rows
from captrain.comparison.points import LOCKS, SweepPoint, prepare, run
from captrain.comparison.sweep import point_of, sweep_name
from captrain.errors import UserError
from captrain.projects import init_project
from captrain.records import Task, publish_text
from captrain.run import Choice, exclusive
from captrain.training.runs import train

STUDIES = load_script("study_figures").STUDIES
CONF = Path(__file__).parents[2] / "conf"
BIN = Path(sys.executable).parent
PIPELINE = """
stages:
  compose:
    cmd: python stages/fake.py compose
    params: [experiment, seed, overrides]
    deps: [stages/fake.py]
    outs:
      - results/spec.yaml: {cache: false, persist: true}
  base:
    cmd: python stages/fake.py base
    params:
      - results/spec.yaml: [seed]
    deps: [stages/fake.py]
    outs: [artifacts/base]
  evaluation:
    cmd: python stages/fake.py evaluation
    params:
      - results/spec.yaml: [seed, selection]
    deps: [artifacts/base, stages/fake.py]
    plots:
      - results/evaluation: {cache: false}
      - results/capabilities: {cache: false}
"""
STAGE = """
import json, os, sys, time
from pathlib import Path
import yaml
stage = sys.argv[1]
choice = yaml.safe_load(Path("params.yaml").read_text())
if stage == "compose":
    spec = {"seed": choice["seed"], "selection": {"delta": 0.2, "agreement": 4}}
    for one in choice["overrides"]:
        key, value = one.split("=")
        if key.startswith("selection."):
            spec["selection"][key.removeprefix("selection.")] = yaml.safe_load(value)
    Path("results").mkdir(exist_ok=True)
    Path("results/spec.yaml").write_text(yaml.safe_dump(spec))
    sys.exit()
spec = yaml.safe_load(Path("results/spec.yaml").read_text())
with open(os.environ["RAN"], "a") as file:
    file.write(f"{stage} {spec['seed']} {spec['selection']['delta']} {spec['selection']['agreement']}\\n")
if stage == "base":
    time.sleep(1)
    Path("artifacts").mkdir(exist_ok=True)
    Path("artifacts/base").write_text(str(spec["seed"]))
elif spec["selection"]["delta"] == 0.9 and not os.path.exists(os.environ["MENDED"]):
    sys.exit("error: a threshold that nothing reaches")
else:
    delta = spec["selection"]["delta"]
    main = "method,label,pass_rate,low,high,rollouts_spent\\n"
    for name, text in (
        ("evaluation/main.csv", f"{main}base,base,0.05,0,1,0\\ntrace,TRACE,{delta},0,1,640\\n"),
        ("evaluation/differences.csv", "first,second,difference,low,high,distinguishable,p_holm\\n"),
        ("evaluation/spent.csv", "method,stages\\nbase,\\ntrace,evaluation\\n"),
        ("capabilities/selection.json", ACCOUNT),
    ):
        Path("results", name).parent.mkdir(parents=True, exist_ok=True)
        Path("results", name).write_text(text)
""".replace("ACCOUNT", repr(json.dumps(account([{"id": "looking", "selected": True}]))))
STUDY = """# @package _global_
hydra:
  sweeper:
    params:
      selection.delta: 0.1,0.3
      seed: 0,1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with three quick stages, which record that they ran."""
    publish_text(tmp_path / "dvc.yaml", PIPELINE)
    publish_text(tmp_path / "stages/fake.py", STAGE)
    publish_text(tmp_path / "params.yaml", "experiment: default\nseed: 0\noverrides: [selection.agreement=3]\n")
    publish_text(tmp_path / ".gitignore", "/.cache/\n/artifacts/\n")
    publish_text(tmp_path / ".dvc/config", "")
    publish_text(tmp_path / "conf/study/thresholds.yaml", STUDY)
    shutil.copytree(Path(__file__).parents[2] / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def sweep(project: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and the stages that ran."""
    ran = project / ".cache/ran.txt"
    ran.parent.mkdir(exist_ok=True)
    ran.unlink(missing_ok=True)
    environment = {**os.environ, "RAN": str(ran), "MENDED": str(project / ".cache/mended"), "COLUMNS": "200"}
    command: list[str | Path] = [BIN / "captrain-sweep"]
    if not any(argument.startswith("hydra/launcher=") for argument in arguments):  # these start processes
        environment[EXECUTABLE] = str(warm_commands() / "python")
        command.insert(0, environment[EXECUTABLE])
    done = subprocess.run(
        [*command, *arguments], cwd=project, text=True, timeout=PATIENCE, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout, sorted(ran.read_text().splitlines()) if ran.exists() else []


def points(project: Path, name: str) -> set[str]:
    """The points of a sweep's table."""
    return set(pd.read_csv(project / f"results/sweeps/{name}.csv")["point"])


def test_a_study_names_its_table_shares_points_and_can_be_overridden(project: Path) -> None:
    status, said, ran = sweep(
        project, "-m", "+study=thresholds", "selection.delta=0.1,0.4", "seed=0", "machine.workers=1"
    )  # fmt: skip
    assert (status, ran) == (0, ["base 0 0.1 3", "evaluation 0 0.1 3", "evaluation 0 0.4 3"]), said
    table = pd.read_csv(project / "results/sweeps/thresholds.csv")
    assert list(table.columns[:4]) == ["experiment", "seed", "selection.delta", "point"]
    assert sorted(set(table["selection.delta"])) == [0.1, 0.4] and set(table["seed"]) == {0}
    # The same settings without the study give the same points.
    status, said, ran = sweep(project, "-m", "selection.delta=0.1,0.4")
    assert (status, ran, points(project, "sweep")) == (0, [], points(project, "thresholds")), said


def test_points_share_stages_and_fail_and_rerun_independently(project: Path) -> None:
    grid = ["-m", "selection.delta=0.1,0.9", "seed=0,1", "hydra.job.name=thresholds"]
    status, said, ran = sweep(project, *grid)
    assert status == 1, said
    assert ran == [
        "base 0 0.1 3", "base 1 0.1 3",
        "evaluation 0 0.1 3", "evaluation 0 0.9 3", "evaluation 1 0.1 3", "evaluation 1 0.9 3",
    ]  # fmt: skip
    assert "2 of 4 points failed" in said and "error: a threshold that nothing reaches" in said
    assert "Traceback" not in said
    table = pd.read_csv(project / "results/sweeps/thresholds.csv")
    assert list(table.columns[:5]) == ["experiment", "seed", "selection.delta", "point", "method"]
    trace = table[table["method"] == "trace"]
    assert len(table) == 4 and list(trace["selection.delta"]) == [0.1, 0.1]
    assert list(trace["seed"]) == [0, 1] and list(trace["pass_rate"]) == list(trace["selection.delta"])
    assert set(table["selected"]) == {"looking"} and set(trace["rollouts_spent"]) == {640}
    publish_text(project / ".cache/mended", "")
    status, said, ran = sweep(project, *grid)
    assert (status, ran) == (0, ["evaluation 0 0.9 3", "evaluation 1 0.9 3"]), said
    assert len(points(project, "thresholds")) == 4


@pytest.mark.usefixtures("vouched")
def test_points_with_one_to_four_capabilities_train_four_adapters(
    project: Path, tiny: Path, opened: list[Task]
) -> None:
    def play(count: int) -> list[str]:
        """The digests of a point's adapters; it trains them by jobs as those of stage `adapters`."""
        point = SweepPoint(Choice(experiment="default", seed=0, overrides=[f"capabilities.count={count}"]))
        with inside(prepare(point, project)):
            return [train(job(tiny, path, name=path.stem, rollouts=8)).digest for path in environments[:count]]

    environments = [project / f"{letter}.py" for letter in "abcd"]
    for path in environments:
        path.write_text(LETTERS.format(name=path.stem, flat=0))
    digests = [play(count) for count in (1, 2, 3, 4)]
    assert len(opened) == 4 * 8
    assert all(one == digests[3][: len(one)] for one in digests) and len({*digests[3]}) == 4


@pytest.mark.needs("minutes")
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_points_that_start_together_run_a_cold_stage_they_share_once(launcher: str, project: Path) -> None:
    status, said, ran = sweep(project, "-m", "selection.delta=0.1,0.4", f"hydra/launcher={launcher}")
    assert status == 0, said
    assert sum(one.startswith("base") for one in ran) == 1 and len(ran) == 3
    assert len(points(project, "sweep")) == 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of two nodes."""
    with running(tmp_path_factory.mktemp("cluster")) as one:
        yield one


SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.cpus_per_task=1"]


@pytest.mark.needs("slurm")
def test_a_grid_of_slurm_jobs_shares_stages_and_resumes_after_a_failure(project: Path, cluster: Cluster) -> None:
    grid = ["-m", "selection.delta=0.1,0.9", "seed=0,1", "hydra.job.name=grid", *SLURM]
    status, said, ran = sweep(project, *grid)
    # Any point may run a shared stage first.
    assert (status, [one[:6] if one.startswith("base") else one for one in ran]) == (1, [
        "base 0", "base 1",
        "evaluation 0 0.1 3", "evaluation 0 0.9 3", "evaluation 1 0.1 3", "evaluation 1 0.9 3",
    ]), said  # fmt: skip
    assert "2 of 4 points failed" in said and "error: a threshold that nothing reaches" in said
    assert cluster.over() == ["grid COMPLETED"] * 4
    listed = subprocess.run([BIN / "captrain", "jobs"], cwd=project, capture_output=True, text=True, check=True).stdout
    assert listed.count("sweep grid") == listed.count("ended") == 4
    [job, *_] = re.findall(r"^\S+_0\b", listed, re.MULTILINE)
    log = subprocess.run([BIN / "captrain", "jobs", job], cwd=project, capture_output=True, text=True, check=True)
    assert "Exiting after successful completion" in log.stdout
    publish_text(project / ".cache/mended", "")
    status, said, ran = sweep(project, *grid)
    assert (status, ran) == (0, ["evaluation 0 0.9 3", "evaluation 1 0.9 3"]), said
    assert len(points(project, "grid")) == 4


def shown_jobs(project: Path) -> list[str]:
    """The states of the sweep's jobs, as `captrain jobs` shows them."""
    listed = subprocess.run([BIN / "captrain", "jobs"], cwd=project, capture_output=True, text=True, check=True).stdout
    return sorted(re.findall(r"sweep sweep +(\w+)", listed))


@pytest.mark.needs("slurm")
def test_a_point_with_a_dead_slurm_job_is_named_and_finished_points_are_gathered(
    project: Path, cluster: Cluster
) -> None:
    stage = project / "stages/fake.py"
    dying = """if spec["selection"]["delta"] == 0.8 and not os.path.exists(os.environ["MENDED"]):
    os.kill(int(os.environ["SLURM_TASK_PID"]), 9)
    time.sleep(5)
    sys.exit("left behind")
"""
    stage.write_text(stage.read_text().replace('if stage == "base":', f'{dying}if stage == "base":'))
    grid = ["-m", "selection.delta=0.1,0.8", *SLURM]
    status, said, _ = sweep(project, *grid)
    point = point_of(Choice(experiment="default", seed=0, overrides=["selection.agreement=3"]), ["selection.delta=0.8"])
    assert status == 1 and f"point {point.name} did not finish" in said and "1 of 2 points failed" in said
    assert len(points(project, "sweep")) == 1
    cluster.over()
    assert shown_jobs(project) == ["ended", "failed"]
    publish_text(project / ".cache/mended", "")
    status, said, ran = sweep(project, *grid)
    assert (status, ran) == (0, ["evaluation 0 0.8 3"]), said


@pytest.mark.needs("proc")
def test_an_interrupted_sweep_ends_the_stage_of_its_point(project: Path) -> None:
    slow = """
import os, sys, time
from pathlib import Path
from captrain.run import entry_point

@entry_point
def main():
    Path(os.environ["RAN"]).write_text(str(os.getpid()))
    time.sleep(3600)

main()
"""
    publish_text(project / "stages/fake.py", slow)
    file = project / ".cache/pid"
    environment = {**os.environ, "RAN": str(file)}
    running = subprocess.Popen(
        [BIN / "captrain-sweep", "-m", "seed=0"], cwd=project, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
    )  # fmt: skip
    until(lambda: file.exists() and file.read_text() != "")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130 and said.count("finished work is kept") == 1 and "Traceback" not in said
    until(lambda: not alive(int(file.read_text())))


@pytest.mark.parametrize("name", ["../up", "a/b", "/tmp/x", "-n"])
def test_the_name_of_a_sweep_is_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a name of a file"):
        sweep_name([f"hydra.job.name={name}"], tmp_path)


def test_a_sweep_runs_in_a_folder_of_any_name(tmp_path: Path) -> None:
    root = tmp_path / "ünï проект it's,a=b (c)#&[1]~$ {x"
    init_project(root)
    publish_text(root / "stages/compose.py", 'raise SystemExit("error: stopped here")\n')
    command = [BIN / "captrain-sweep", "-m", "selection.delta=.3", "hydra.job.name=odd"]
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 1 and "error: stopped here" in done.stdout, done.stdout + done.stderr
    root = root.rename(tmp_path / "a${b}")
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2 and "a${b} holds ${, which Hydra takes for a setting" in done.stderr


def test_an_unknown_setting_fails_before_anything_runs(project: Path) -> None:
    status, said, ran = sweep(project, "-m", "selection.detla=0.1,0.2")
    assert status == 2 and ran == [] and "there is no setting selection.detla" in said and "did you mean" in said
    assert "Error" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--cfg", "job", "--package", "selection"), 0, "delta: 0.2"),
        (("--hydra-help",), 0, "Hydra ("),
        (("--info", "searchpath"), 0, "Config search path"),
        (("--help",), 0, "captrain-sweep -m"),
        (("-m", "hydra/sweeper=optun"), 2, "there is no hydra/sweeper 'optun'\n  remedy: choose one of basic"),
        (("-m", "hydra/launcher=jobli"), 2, "did you mean joblib?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_it_answers_as_every_hydra_application(
    project: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    ended, said, ran = sweep(project, *arguments)
    assert (ended, ran) == (status, []) and says in said and "Traceback" not in said, said


def test_the_folder_of_hydras_files_can_be_chosen(project: Path) -> None:
    status, said, _ = sweep(project, "-m", "seed=0", "hydra.sweep.dir=elsewhere")
    assert status == 0 and (project / "elsewhere/0/.hydra/overrides.yaml").exists(), said
    assert len(points(project, "sweep")) == 1


def test_a_sweep_runs_no_stage_that_the_results_here_already_have(project: Path) -> None:
    ran = project / ".cache/ran.txt"
    ran.parent.mkdir()
    environment = {**os.environ, "RAN": str(ran), "MENDED": "", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["dvc", "repro", "-q"], cwd=project, env=environment, check=True)
    shutil.rmtree(project / ".dvc/cache/runs")  # as after `dvc pull` into a new clone
    status, said, ran_stages = sweep(project, "-m", "selection.delta=0.2,0.3")
    assert (status, ran_stages) == (0, ["evaluation 0 0.3 3"]), said
    assert len(points(project, "sweep")) == 2


def test_an_unknown_study_is_named_with_the_known_ones(project: Path) -> None:
    status, said, ran = sweep(project, "-m", "+study=treshold")
    assert status == 2 and ran == [] and "there is no study 'treshold'" in said and "thresholds" in said


def test_every_study_composes_and_varies_the_settings_of_its_figure() -> None:
    from hydra import compose, initialize_config_dir

    found = {}
    for path in sorted((CONF / "study").glob("*.yaml")):
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            config = compose("config", [f"+study={path.stem}"], return_hydra_config=True)
        found[f"sweeps/{path.stem}.csv"] = dict(config.hydra.sweeper.params)
    for study in STUDIES.values():
        if study.settings:
            params = found.pop(study.tables[0])
            varied = {name for name, values in params.items() if "," in str(values)}
            assert "seed" in params and varied - {"seed"} == {*study.settings}
    assert not found


def test_a_missing_m_or_repository_has_a_remedy(project: Path, tmp_path: Path) -> None:
    status, said, _ = sweep(project, "selection.delta=0.1")
    assert status == 2 and "add -m" in said
    (project / "dvc.yaml").unlink()
    status, said, _ = sweep(project, "-m", "selection.delta=0.1")
    assert status == 2 and "root of the repository" in said


def test_a_points_settings_win_over_those_of_params_yaml() -> None:
    base = Choice(experiment="default", seed=3, overrides=["selection.delta=0.5", "+analyst.extra=1"])
    point = point_of(base, ["+study=some", "selection.delta=0.1", "experiment=rare", "analyst.extra=2"])
    assert point.choice == Choice(
        experiment="rare", seed=3, overrides=["selection.delta=0.1", "analyst.extra=2"]
    )  # fmt: skip


@pytest.mark.parametrize(
    "override", ["machine.workers=1", "machine=slurm", "+machine.accelerate.rows=1", "++machine.workers=1"]
)
def test_machine_settings_are_not_part_of_a_points_name(override: str) -> None:
    def name(*overrides: str) -> str:
        return SweepPoint(Choice(experiment="default", seed=0, overrides=[*overrides])).name

    assert name(override) == name() == "default-0"
    assert name("machines=1") != name() != name("selection.delta=0.1") == name("selection.delta=0.1", override)


def test_a_second_sweep_of_the_same_name_is_rejected_while_the_first_runs(project: Path) -> None:
    with exclusive(project / LOCKS / "sweep-grid"):
        status, said, ran = sweep(project, "-m", "selection.delta=0.1", "hydra.job.name=grid")
    assert (
        (status, ran) == (2, []) and "a sweep named grid is already running here" in said and "hydra.job.name=" in said
    )


def test_two_processes_use_a_points_workspace_one_after_the_other(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = project / ".cache/ran.txt"
    publish_text(ran, "")
    monkeypatch.setenv("RAN", str(ran))
    monkeypatch.setenv("MENDED", "")
    selections = [Choice(experiment="default", seed=0, overrides=[f"machine.workers={count}"]) for count in (1, 2)]
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda choice: run(SweepPoint(choice), project), selections)
    assert first == second and sorted(ran.read_text().splitlines()) == ["base 0 0.2 4", "evaluation 0 0.2 4"]
    with ThreadPoolExecutor() as pool, exclusive(SweepPoint(selections[0]).lock(project)):
        reading = pool.submit(point_rows, SweepPoint(selections[1]), project)
        with pytest.raises(TimeoutError):
            reading.result(0.3)  # the holder of the lock may be working there
    assert [row["method"] for row in reading.result()] == ["base", "trace"]
