"""A project of one's own: begun in an empty folder, composed over captrain's configuration, run, and brought to another
version."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from support.finished import Captrain

from captrain import __version__ as captrain_version
from captrain.errors import UserError
from captrain.projects.pipeline import digested, remove_cut_off, shipped_stages
from captrain.records import publish_text
from captrain.run import compose_spec, load_spec, read_stages

ROOT = Path(__file__).parents[2]
STAGES = shipped_stages()
MINE = """from captrain.benchmarks import ServiceDesk
class Desk(ServiceDesk):
    def __init__(self, *, floor: int = 2) -> None:
        super().__init__(mix="rare")
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after `captrain init --benchmark calendar`."""
    folder = tmp_path_factory.mktemp("begun") / "mine"
    command = [sys.executable, "-m", "captrain.cli.app", "init", str(folder), "--benchmark", "calendar"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def project(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, with importable modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "components"]:
        monkeypatch.delitem(sys.modules, name)
    folder = shutil.copytree(begun, tmp_path / "mine", symlinks=True)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return folder


def edit_versions(project: Path, **changes: object) -> None:
    """Pretend that another version of captrain created the project."""
    path = project / "captrain.yaml"
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def test_its_stages_have_the_settings_and_results_of_captrains_own_and_code_by_digest(project: Path) -> None:
    stages = read_stages(project / "dvc.yaml", "")
    recorded = yaml.safe_load((project / "captrain.yaml").read_text())["stages"]
    assert [*stages] == [*STAGES] and [*recorded] == [*dict.fromkeys(map(digested, STAGES))]
    for name, stage in stages.items():
        assert stage["cmd"] == f"captrain run {name}"
        # The stage `compose` derives the digests, from the version that captrain.yaml names.
        assert stage["params"] == STAGES[name]["params"] + ([{"captrain.yaml": None}] if name == "compose" else [])
        assert {key: stage.get(key) for key in ("outs", "plots", "metrics")} == {
            key: STAGES[name].get(key) for key in ("outs", "plots", "metrics")
        }
        assert not [path for path in stage.get("deps", []) if path.startswith(("src/", "stages/"))]
    assert "components" in stages["rollouts"]["deps"] and "components" not in stages["figures"]["deps"]


def test_every_input_of_a_new_projects_stages_is_there_or_made_by_a_stage(project: Path) -> None:
    stages = read_stages(project / "dvc.yaml", "")
    made = [
        path
        for stage in stages.values()
        for kind in ("outs", "plots", "metrics")
        for entry in stage.get(kind, [])
        for path in ([entry] if isinstance(entry, str) else entry)
    ]
    needed = {path for stage in stages.values() for path in stage.get("deps", [])}
    given = {path for path in needed if (project / path).exists()}
    related = {
        path for path in needed if any(f"{a}/".startswith(f"{b}/") for m in made for a, b in ((path, m), (m, path)))
    }
    assert needed - given - related == set()


def test_what_it_has_in_conf_comes_first_and_all_else_is_captrains(project: Path) -> None:
    spec = compose_spec("calendar", 0, ["router=classifier"], project / "conf")
    assert spec.benchmark.target == "components.calendar_desk:CalendarDesk"
    assert spec.router.target.endswith("ClassifierRouter")
    (project / "conf/router").mkdir()
    router = {"_target_": "captrain.routing.retrieval.RetrievalRouter", "neighbours": 3}
    (project / "conf/router/classifier.yaml").write_text(yaml.safe_dump(router))
    assert compose_spec("smoke", 0, ["router=classifier"], project / "conf").router.settings() == {"neighbours": 3}


def test_layers_are_composed_without_a_copy_that_a_killed_process_would_leave(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(project / "nowhere"))
    publish_text(project / "conf/experiment/mine.yaml", "# @package _global_\nselection: {delta: 0.3}\n")
    before = sorted(project.rglob("*"))
    assert compose_spec("mine", 0, [], project / "conf").selection.delta == 0.3
    assert sorted(project.rglob("*")) == before


def test_a_class_named_by_an_override_brings_its_own_settings_alone(project: Path, captrain: Captrain) -> None:
    (project / "components/mine.py").write_text(MINE)
    choice = {"experiment": "project_default", "seed": 0, "overrides": ["benchmark._target_=components.mine:Desk"]}
    (project / "conf/experiment/project_default.yaml").write_text("# @package _global_\n{}\n")
    (project / "params.yaml").write_text(yaml.safe_dump(choice))
    status, _, err = captrain(project, "run", "compose")
    assert status == 0, err
    assert load_spec(project / "results/spec.yaml").benchmark.settings() == {}
    choice["overrides"].append("+benchmark.flor=3")
    (project / "params.yaml").write_text(yaml.safe_dump(choice))
    status, _, err = captrain(project, "run", "compose")
    assert status == 2 and "has no setting benchmark.flor" in err and "did you mean floor?" in err


def test_another_captrain_is_refused_until_it_is_taken_over_which_says_what_is_stale(
    project: Path, captrain: Captrain
) -> None:
    edit_versions(project, captrain="0.0.9", stages={"routes": "0" * 16})
    status, _, err = captrain(project, "run", "routes")
    assert status == 2 and "was recorded with captrain 0.0.9, but" in err and "captrain upgrade" in err
    status, out, _ = captrain(project, "upgrade", "--dry-run")
    assert status == 0 and "stale, because their code differs: routes\n" in out and "nothing was changed" in out
    assert "stale only if their inputs change: controls, evaluation, comparison, causality, figures" in out
    assert captrain(project, "upgrade")[1].splitlines()[0].startswith("captrain 0.0.9 -> ")
    assert "the project is up to date" in captrain(project, "upgrade")[1]


def test_an_edited_pipeline_is_not_replaced(project: Path, captrain: Captrain) -> None:
    path = project / "dvc.yaml"
    path.write_text(path.read_text().replace("captrain run figures", "captrain run figures  # mine"))
    edit_versions(project, stages={"routes": "0" * 16})
    status, _, err = captrain(project, "upgrade")
    assert status == 2 and "dvc.yaml was edited" in err and "# mine" in path.read_text()


def test_a_script_of_the_project_wins_and_an_unknown_stage_is_told_its_neighbours(
    project: Path, captrain: Captrain
) -> None:
    (project / "stages").mkdir()
    (project / "stages/routes.py").write_text("print('routes of my own')\n")
    assert captrain(project, "run", "routes")[1] == "routes of my own\n"
    status, _, err = captrain(project, "run", "rolouts")
    assert status == 2 and "did you mean rollouts" in err
    status, _, err = captrain(project, "run", "foo")
    assert status == 2 and err.endswith("remedy: `dvc stage list --name-only` lists the stages\n")


def test_a_stage_whose_code_alone_differs_is_not_blamed_on_the_version(project: Path, captrain: Captrain) -> None:
    edit_versions(project, stages={"routes": "0" * 16})
    status, _, err = captrain(project, "run", "routes")
    assert status == 2 and "the installed code of stage routes differs" in err and "is installed" not in err


def test_init_replaces_nothing_and_begins_no_project_within_another(tmp_path: Path, captrain: Captrain) -> None:
    (tmp_path / "README.md").write_text("mine")
    status, _, err = captrain(tmp_path, "init", ".")
    assert status == 2 and "has README.md already" in err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    status, _, err = captrain(tmp_path, "init", "full")
    assert status == 2 and "full has notes.txt already" in err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "new/.git").mkdir(parents=True)
    assert captrain(tmp_path, "init", "new")[0] == 0
    status, _, err = captrain(tmp_path, "init", "new/inner")
    assert status == 2 and "is in the project new/ already" in err


def test_init_begins_a_project_beside_the_one_it_is_called_in(tmp_path: Path, captrain: Captrain) -> None:
    assert captrain(tmp_path, "init", "first")[0] == 0
    assert captrain(tmp_path / "first", "init", "../second")[0] == 0
    assert (tmp_path / "second/dvc.yaml").exists()


def test_the_tests_that_a_project_begins_with_pass(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_project_without_a_benchmark_passes_its_own_checks_from_its_first_commit(
    tmp_path: Path, captrain: Captrain
) -> None:
    assert captrain(tmp_path, "init", "plain")[0] == 0
    folder = tmp_path / "plain"
    steps = yaml.safe_load((folder / ".github/workflows/check.yaml").read_text())["jobs"]["check"]["steps"]
    install, plan, tests, _ = [step["run"] for step in steps if "run" in step]
    assert install == "pip install -r requirements.txt pytest" and captrain(folder, *plan.split()[1:])[0] == 0
    process = subprocess.run([sys.executable, *tests.split()[1:]], cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
    pins = (folder / "requirements.txt").read_text()
    assert "captrain[train]==" in pins and "No index that you use has it?" in pins


def test_the_command_says_which_captrain_it_is(tmp_path: Path, captrain: Captrain) -> None:
    assert captrain(tmp_path, "--version") == (0, f"captrain {captrain_version}\n", "")


@pytest.mark.needs("minutes")
def test_a_wheel_holds_all_that_a_project_needs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    # A copy, because setuptools writes into the source folder.
    listed = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in listed:
        if name.startswith(("src/", "conf/", "stages/", ".dvc/plots")) or name in (
            "pyproject.toml",
            "dvc.yaml",
            "README.md",
            "LICENSE",
        ):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, tmp_path / "source")
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    [wheel] = tmp_path.glob("captrain-*.whl")
    call(*pip, "--python", tmp_path / "venv/bin/python", "install", "--no-deps", "--no-index", wheel)
    [packages] = (tmp_path / "venv").glob("lib/*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    captrain = tmp_path / "venv/bin/captrain"
    call(captrain, "init", "mine", "--benchmark", "calendar")
    call(captrain, "run", "compose", cwd=tmp_path / "mine")
    assert load_spec(tmp_path / "mine/results/spec.yaml").rollouts.tasks == 120
    begun = yaml.safe_load((tmp_path / "mine/captrain.yaml").read_text())
    where = call(tmp_path / "venv/bin/python", "-c", "import captrain; print(captrain.__file__)")
    assert str(packages) in where and begun["stages"]["rollouts"] == digest_here("rollouts")


def digest_here(stage: str) -> str:
    from captrain.projects.pipeline import stage_digest

    return stage_digest(stage)


def test_outside_of_conf_a_typo_in_an_experiment_names_those_of_both_layers(project: Path) -> None:
    with pytest.raises(UserError, match="calendar.*smoke"):
        compose_spec("nothing-like-it", 0, [], project / "conf")


@pytest.mark.parametrize(
    "lock", ["", "schema: '2.0'\nstages:\n  base:\n    deps:\n    - pa", "schema: '2.0'\nstages: [a"]
)
def test_files_of_dvc_that_a_kill_has_cut_off_are_removed_before_a_run(lock: str, tmp_path: Path) -> None:
    publish_text(tmp_path / "dvc.lock", (ROOT / "dvc.lock").read_text())
    publish_text(tmp_path / ".dvc/tmp/rwlock", "{}")
    assert remove_cut_off(tmp_path) == []
    publish_text(tmp_path / "dvc.lock", lock)
    publish_text(tmp_path / ".dvc/tmp/rwlock", '{"read": {"results/spec.yaml": [')
    assert remove_cut_off(tmp_path) == [".dvc/tmp/rwlock", "dvc.lock"] and remove_cut_off(tmp_path) == []


def test_a_file_that_was_whole_at_first_is_left_to_the_dvc_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_text(tmp_path / "dvc.lock", (ROOT / "dvc.lock").read_text())
    publish_text(tmp_path / ".dvc/tmp/rwlock", "{")
    monkeypatch.setattr("time.sleep", lambda _: publish_text(tmp_path / "dvc.lock", "stages: [a"))
    assert remove_cut_off(tmp_path) == [".dvc/tmp/rwlock"] and (tmp_path / "dvc.lock").exists()
