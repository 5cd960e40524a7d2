"""`captrain-sweep` in a user's project: the real compose stage, and two quick scripts in place of the others."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from support.results import account
from support.warm import EXECUTABLE

from captrain.projects import init_project
from captrain.records import publish_text

STAGES = ("compose", "base", "comparison")
BASE = """
import json
from pathlib import Path
import yaml
spec = yaml.safe_load(Path("results/spec.yaml").read_text())
Path("artifacts").mkdir(exist_ok=True)
Path("artifacts/base").write_text("")
Path("results/base.json").write_text(json.dumps(spec["benchmark"]["theirs"]))
"""
EVALUATION = """
import json
from pathlib import Path
import yaml
from components.calendar_desk import CalendarDesk
spec = yaml.safe_load(Path("results/spec.yaml").read_text())
rate, rows = spec["selection"]["delta"], "method,label,pass_rate,low,high,rollouts_spent"
tables = {
    "evaluation/main.csv": f"{rows}\\nbase,base,0.05,0,1,0\\ntrace,TRACE,{rate},0,1,640\\n",
    "evaluation/differences.csv": "first,second,difference,low,high,distinguishable,p_holm\\n",
    "evaluation/spent.csv": "method,stages\\nbase,\\ntrace,evaluation\\n",
    "capabilities/selection.json": json.dumps(ACCOUNT).replace("DESK", CalendarDesk.name),
}
for name, text in tables.items():
    Path("results", name).parent.mkdir(parents=True, exist_ok=True)
    Path("results", name).write_text(text)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A calendar project whose pipeline has the composition and two more stages."""
    folder = tmp_path / "mine"
    init_project(folder, "calendar")
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    assert [stages[name]["cmd"] for name in STAGES] == [f"captrain run {name}" for name in STAGES]
    compose = stages["compose"]
    outs: dict[str, list[object]] = {"outs": ["artifacts/base"], "metrics": [{"results/base.json": {"cache": False}}]}
    base = {"cmd": "captrain run base", "params": [{"results/spec.yaml": ["benchmark"]}], **outs}
    evaluation = {
        "cmd": "captrain run comparison",
        "params": [{"results/spec.yaml": ["selection"]}],
        "deps": ["artifacts/base", "components"],
        "plots": [{f"results/{name}": {"cache": False}} for name in ("evaluation", "capabilities")],
    }
    pipeline = {"stages": {"compose": compose, "base": base, "comparison": evaluation}}
    publish_text(folder / "dvc.yaml", yaml.safe_dump(pipeline, sort_keys=False))
    publish_text(folder / "stages/base.py", BASE)
    selection = account([{"id": "DESK", "selected": True}])
    publish_text(folder / "stages/comparison.py", EVALUATION.replace("ACCOUNT", repr(selection)))
    return folder


@pytest.mark.needs("minutes")
def test_a_sweep_in_a_project_gathers_its_points_in_the_projects_table(project: Path, warm: Path) -> None:
    command: list[str | Path] = [warm / "python", Path(sys.executable).with_name("captrain-sweep")]
    grid = ["-m", "selection.delta=0.1,0.4", "hydra.job.name=deltas"]
    path = os.pathsep.join([str(warm), os.environ["PATH"]])
    environment = {**os.environ, "COLUMNS": "80", "PATH": path, EXECUTABLE: str(warm / "python")}
    done = subprocess.run([*command, *grid], cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 points in results/sweeps/deltas.csv" in done.stdout
    table = pd.read_csv(project / "results/sweeps/deltas.csv")
    trace = table[table["method"] == "trace"]
    assert list(trace["selection.delta"]) == list(trace["pass_rate"]) == [0.1, 0.4]
    assert set(table["experiment"]) == {"calendar"} and len(set(table["selected"])) == 1
    assert not (project / "results/evaluation").exists(), "points have workspaces of their own"
