"""The report: its page without a browser, its selection rule, and its use in a browser."""

import json
import re
import shutil
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import Browser
from support.figures import digests
from support.finished import Captrain
from support.needs import further
from support.results import causal_tables, publish_played

from captrain.capabilities.selection import select
from captrain.cli import app
from captrain.comparison import published
from captrain.errors import UserError
from captrain.records import (
    Capability,
    CheckResult,
    Label,
    Message,
    Passport,
    Rollout,
    RolloutLabels,
    Score,
    Task,
    Verdict,
    load,
    publish,
    publish_json,
    publish_text,
)
from captrain.reporting import tables
from captrain.reporting.pages import build, rollouts, site
from captrain.run import SelectionSettings

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
STATIC = Path(build.__code__.co_filename).parent / "static"
KINDS = ("check", "pick")
LIMITS = SelectionSettings(delta=0.2, coverage=0.1, agreement=3, confidence=0.95, floor=0.0, resamples=200)
NAMES = {"check_first": "Check first", "pick_right": "Pick right", "be_polite": "Be polite", "seldom": "Seldom"}
CANDIDATES = [Capability(id=slug, name=name, description=f"{name}, always.") for slug, name in NAMES.items()]
MAIN = """method,label,pass_rate,low,high,pass_hat_k,mean_reward,tasks,excluded,trials,errors,rollouts_spent
base,base,0.374,0.332,0.416,0.26,0.374,6,0,12,0,0
trace,TRACE,0.577,0.533,0.619,0.44,0.577,6,0,12,0,3200
solutions,"TRACE, solutions",0.7,0.6,0.8,0.5,0.7,6,0,12,0,640
bound:oracle,bound: oracle router,0.6,0.5,0.7,,,6,0,12,0,3200
"""
DIFFERENCES = """first,second,difference,low,high,better,worse,p,distinguishable,effect,p_holm
trace,base,0.203,0.166,0.240,147,24,0.0000001,True,0.41,0.000001
trace,grpo_target,-0.026,-0.06,0.006,69,79,0.46,False,-0.05,1.0
router:sets,grpo_target,-0.044,-0.077,-0.011,67,86,0.145,True,-0.09,0.727
bound:oracle,trace,-0.005,-0.02,0.011,30,54,,False,-0.01,
"""
KIND_ROWS = """kind,method,label,pass_rate,low,high,pass_hat_k,mean_reward,tasks
check,base,base,0.2,0.1,0.3,0.1,0.2,3
check,trace,TRACE,0.8,0.7,0.9,0.6,0.8,3
"""
SPENT = """method,label,rollouts,discarded,errors,prompt_tokens,completion_tokens,stages
base,base,0,0,0,0,0,
trace,TRACE,3200,728,0,123176,46262,rollouts environments adapters
"""
LEDGER = """method,stage,purpose,rollouts,discarded,errors,prompt_tokens,completion_tokens
trace,rollouts,diagnosis,240,0,0,8521,3185
"""
HISTORY = "adapter,step,rollouts,reward,success,informative\n" + "".join(
    f"check_first,{step},{40 * step},{step / 9},{step / 10},0.5\n" for step in range(1, 6)
)


def call(name: str, **arguments: Any) -> Message:
    asked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [asked]}


def played(name: str, split: str, number: int, trial: int, passed: bool, adapter: str | None = None) -> Rollout:
    purpose = {"discovery": "diagnosis", "test": "evaluation"}[split]
    reference = [call("get", id=number), call("cancel", id=number)]
    own = reference if passed else [call("cancel", id=number)]
    said = HOSTILE if number == 0 else f"Cancel {number}."
    return Rollout(
        id=name,
        environment="desk",
        task=Task(id=f"desk/{split}/{number}", split=split, data={"kind": KINDS[number % 2]}),  # type: ignore[arg-type]
        trial=trial,
        purpose=purpose,  # type: ignore[arg-type]
        policy="p0",
        adapter=adapter,
        messages=[
            {"role": "system", "content": "You are a desk."},
            {"role": "user", "content": said},
            *own,
            {"role": "tool", "name": "cancel", "content": '{"ok": true}'},
            {"role": "assistant", "content": "Done."},
        ],
        reference=reference,
        score=Score(reward=float(passed), success=passed, parts={"database": float(passed)}),
        outcome="passed" if passed else "failed",
    )


def labelled(dialogues: list[Rollout], runs: int = 5, seed: int = 0) -> list[RolloutLabels]:
    """Labels in which some candidates contrast, some do not, and one is seldom exercised or proposed."""
    drawn = np.random.default_rng(seed)
    odds = {"check_first": (0.9, 0.1), "pick_right": (0.4, 0.2), "be_polite": (0.6, 0.6), "seldom": (0.5, 0.1)}
    found = []
    for run in range(runs):
        for one in dialogues:
            labels = {}
            for slug, (failed, passed) in odds.items():
                if slug == "seldom" and run == 1:
                    continue
                verdict: Verdict = (
                    "LACKING" if drawn.random() < (passed if one.outcome == "passed" else failed) else "PRESENT"
                )
                if slug == "check_first" and one.outcome == "failed":
                    verdict = "LACKING" if one.task.data["kind"] == "check" else "NA"
                if slug == "seldom" and (one.outcome == "passed" and drawn.random() < 0.9):
                    verdict = "NA"
                labels[slug] = Label(verdict=verdict, evidence=f"cancelled unseen {HOSTILE}", message=2)
            outcome = "passed" if one.outcome == "passed" else "failed"
            count = int(drawn.integers(0, 3))
            found.append(RolloutLabels(run=run, rollout=one.id, outcome=outcome, count=count, labels=labels))
    return found


def made(root: Path) -> Path:
    """Write a project with every file that the report reads."""
    results, artifacts = root / "results", root / "artifacts"
    discovery = [played(f"d{i:03d}", "discovery", i, 0, i % 5 > 2) for i in range(30)]
    arms = (None, "feed")
    evaluation = {
        "check_first" if arm else "base": [
            played(f"e{arm or 'base'}{i}{trial}", "test", i, trial, arm == "feed" and i % 2 == 0, arm)
            for i in range(6)
            for trial in range(2)
        ]
        for arm in arms
    }
    labels = labelled(discovery)
    chosen = select(labels, CANDIDATES, LIMITS, 2, 0)
    publish(artifacts / "rollouts/discovery.jsonl", discovery)
    publish_played(root, evaluation)
    publish(artifacts / "labels/labels.jsonl", labels)
    publish(results / "labels/candidates.jsonl", CANDIDATES)
    publish(results / "capabilities/capabilities.jsonl", chosen.capabilities)
    publish_json(results / "capabilities/selection.json", chosen.report)
    check = CheckResult(name="reward of doing nothing", passed=True, measured=0.05, bound="at most 0.2")
    passport = Passport(
        capability="check_first", environment="e0", attempt=0, passed=True, trusted=True, calibration_tasks=1,
        checks=[check],
    )  # fmt: skip
    publish_json(results / "environments/check_first.passport.json", passport)
    publish_text(results / "environments/check_first.py", f'"""An environment. {HOSTILE}"""\n')
    row = {"digest": "feed", "path": "artifacts/adapters/feed", "rollouts": 200, "discarded": 40}
    publish_json(results / "adapters/index.json", {"check_first": row})
    publish_json(results / "evaluation/metrics.json", {"confidence": 0.95})
    tables = {
        "adapters/history.csv": HISTORY,
        "evaluation/main.csv": MAIN,
        "evaluation/differences.csv": DIFFERENCES,
        "evaluation/kinds.csv": KIND_ROWS,
        "evaluation/spent.csv": SPENT,
        "evaluation/ledger.csv": LEDGER,
        "routes/routes.csv": "task,kind,retrieval,chosen\n"
        + "".join(f"desk/test/{i},{KINDS[i % 2]},base,{'base' if i % 2 else 'check_first'}\n" for i in range(6)),
        **causal_tables("check_first"),
    }
    for name, text in tables.items():
        publish_text(results / name, text)
    stage = {"cmd": "python stages/comparison.py", "desc": "Every method"}
    publish_json(root / "dvc.yaml", {"stages": {"comparison": stage, "labels": stage}})
    out = {"path": "results/evaluation", "md5": "ab95.dir", "size": 14701}
    publish_json(root / "dvc.lock", {"stages": {"comparison": {"cmd": "x", "deps": [], "outs": [out]}}})
    return root


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def report(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "report"
    build(project, out)
    return out


class Page(HTMLParser):
    """Content of a page: tags with attributes, text outside scripts and styles, and text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self.inside = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else self.inside
        self.text += " " if tag in ("td", "th", "dt", "dd") else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.text += data
        elif self.inside == "script":
            self.scripts += data


def view(report: Path, name: str) -> Page:
    """One view of the page."""
    parts = (report / "index.html").read_text().split('<section class="view" id="')
    return next(Page('<section id="' + part) for part in parts if part.startswith(f'{name}"'))


def test_the_overview_shows_intervals_and_the_reading_of_each_difference(report: Path) -> None:
    text = " ".join(view(report, "overview").text.split())
    for words in (
        "0.533 to 0.619",
        "no reliable difference",
        "bound: oracle router",
        "undefined",
        "< 0.001",
    ):
        assert words in text
    row = next(
        one for one in (report / "index.html").read_text().splitlines() if "router: sets - GRPO on target" in one
    )
    assert "no reliable difference" in row
    marked = [tag for tag, given in view(report, "overview").tags if tag == "svg" and given.get("role") == "img"]
    assert len(marked) == 4
    marked = [tag for tag, given in view(report, "capabilities").tags if tag == "svg" and given.get("role") == "img"]
    assert len(marked) == len(CANDIDATES) + 2  # and one each for claimed and repaired
    assert "Totals differ: 640, 3,200. TRACE, solutions is taught the environments' own solutions," in text


def test_a_capability_shows_its_failing_messages_environment_and_training(report: Path) -> None:
    found = view(report, "capability-check_first")
    text = " ".join(found.text.split())
    assert "Fails here: cancelled unseen" in text
    assert sum(given.get("class") == "failing" for _, given in found.tags) == site.EXAMPLES
    assert "at most 0.2" in text and "An environment." in text and "5 values" not in text
    assert any(tag == "polyline" for tag, _ in found.tags)


def test_the_page_has_no_inline_script_and_loads_nothing_from_outside(report: Path) -> None:
    assert [path.name for path in report.glob("*.html")] == ["index.html"]
    found = Page((report / "index.html").read_text())
    policy = next(given["content"] for tag, given in found.tags if given.get("http-equiv"))
    assert policy and "default-src 'none'" in policy and "script-src 'self';" in policy
    ids = [given["id"] for _, given in found.tags if "id" in given]
    assert len(ids) == len({*ids})
    for tag, given in found.tags:
        assert not any(name.startswith("on") for name in given), tag
        assert tag != "script" or given.get("type") == "application/json" or given.get("src")
        target = given.get("href") or given.get("src") or ""
        assert not re.match(r"[a-z]+:", target) or target == "data:,", target
        file, _, place = target.partition("#")
        assert not file or file == "data:," or (report / file).exists(), target
        # Links may name stages that this project's dvc.yaml does not have.
        assert not place or place in ids or place.startswith(("rollout/", "rollouts?", "stage-")), target
    assert "http" not in "".join(path.read_text() for path in report.rglob("*.js"))


def test_text_of_rollouts_is_never_markup(report: Path) -> None:
    found = Page((report / "index.html").read_text())
    assert "img" not in {tag for tag, _ in found.tags} and "owned" not in found.scripts
    assert HOSTILE in view(report, "capability-check_first").text
    files = [path.read_text() for path in (report / "data").iterdir()]
    assert not any("<" in text for text in files) and any("owned" in text for text in files)


def test_rows_have_arm_route_and_failing_message_and_a_task_is_in_one_shard(report: Path) -> None:
    (table,) = arguments(report / "data/rows.js")
    columns = table["columns"]
    assert len(columns["id"]) == 30 + 24 and table["arms"] == ["base", "check_first"]
    shards_of: dict[int, set[int]] = {}
    for task, shard in zip(columns["task"], columns["shard"], strict=True):
        shards_of.setdefault(task, set()).add(shard)
    assert all(len(one) == 1 for one in shards_of.values())
    at = columns["id"].index("ebase00")
    assert table["tasks"][columns["task"][at]][4] == "check_first"
    # The reference looks up the record first; the rollout cancels at once, in message 2.
    assert (columns["mark"][at], columns["outcome"][at]) == (2, "f")
    _, shard = arguments(report / f"data/shard-{columns['shard'][at]:03d}.js")
    assert shard["rollouts"]["ebase00"]["marks"][0]["why"] == "the reference calls get(id=0) before this"
    lacking = shard["rollouts"]["d000"]["marks"][0]
    assert (lacking["capability"], lacking["runs"], lacking["selected"]) == ("check_first", "5 of 5", True)


@pytest.mark.parametrize(
    ("calls", "departure"),
    [
        ([call("get", id=1), call("cancel", id=1)], None),
        ([call("get", id=1), call("cancel", id=2)], (1, "the reference calls cancel(id=1) here")),
        ([call("cancel", id=1)], (0, "the reference calls get(id=1) before this")),
        ([call("get", id=1)], (1, "the reference calls cancel(id=1) before this")),
        ([call("get", id=1), call("cancel", id=1), call("get", id=1)], (2, "the reference makes no such call")),
    ],
)
def test_a_rollout_departs_from_its_reference_at_the_first_different_call(
    calls: list[Message], departure: tuple[int, str] | None
) -> None:
    written = {"name": "get", "arguments": '{"id": 1}'}  # arguments as text or as an object are equal
    reference = [{"role": "assistant", "tool_calls": [{"type": "function", "function": written}]}, call("cancel", id=1)]
    assert rollouts.departure_of(calls, reference) == departure
    assert rollouts.departure_of(calls, []) is None


def arguments(path: Path) -> list[Any]:
    """Parse the arguments that a data file passes to its function."""
    return json.loads("[" + path.read_text(encoding="utf-8").split("(", 1)[1].removesuffix(");\n") + "]")


def test_shards_end_with_a_task(monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(rollouts, "SHARD", 3)
    build(project, tmp_path / "report")
    (table,) = arguments(tmp_path / "report/data/rows.js")
    columns = table["columns"]
    pairs = {*zip(columns["task"], columns["shard"], strict=True)}
    assert len(pairs) == len(table["tasks"]) and len({*columns["shard"]}) == 10 + 6
    assert len([*(tmp_path / "report/data").glob("shard-*.js")]) == 16


def test_equal_inputs_give_equal_bytes_without_paths_of_the_machine(
    project: Path, report: Path, tmp_path: Path
) -> None:
    build(project, tmp_path / "again")
    assert digests(report) == digests(tmp_path / "again")
    assert not any(str(project) in path.read_text() for path in report.rglob("*") if path.is_file())


def test_the_report_of_a_fresh_clone_says_what_is_missing(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "results", tmp_path / "clone/results")
    build(tmp_path / "clone", tmp_path / "report")
    assert "0.533 to 0.619" in view(tmp_path / "report", "overview").text
    assert "dvc repro" in view(tmp_path / "report", "rollouts").text
    capability = view(tmp_path / "report", "capability-check_first").text
    assert "artifacts/rollouts/discovery.jsonl is not here" in capability and "dvc repro rollouts" in capability
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "report").glob("*.html"))


STUDY = """experiment,seed,adapters.rollouts,gepa.run,point,method,label,pass_rate,low,high,rollouts_spent,cpu_s
default,0,80,False,default-0-49d8d6fa,base,base,0.374000,0.332000,0.416000,0,
default,0,80,False,default-0-49d8d6fa,trace,TRACE,0.512345,0.470000,0.550000,1280.000000,
"""
SUMMARY = """experiment,quantity,seeds,mean,low,high
default,trace-base,5,0.198,0.141,0.256
"""
PIXEL = b"\x89PNG\r\n\x1a\n"


def test_several_runs_have_a_view_with_their_tables_and_figures(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "studied"
    shutil.copytree(project, root)
    build(root, tmp_path / "report")
    assert "Neither results/replicates/ nor results/sweeps/ holds a table" in view(tmp_path / "report", "several").text
    publish_text(root / "results/replicates/summary.csv", SUMMARY)
    publish_text(root / "results/sweeps/rollouts.csv", STUDY)
    (root / "results/studies").mkdir()
    (root / "results/studies/scaling.png").write_bytes(PIXEL)
    build(root, tmp_path / "report")
    found = view(tmp_path / "report", "several")
    text = " ".join(found.text.split())
    assert "Neither" not in text and "default trace-base 5 0.198 0.141 0.256" in text
    assert "adapters.rollouts" in text and "TRACE 0.512 0.470 0.550 1,280" in text
    assert "cpu s" not in text  # a column without a value
    assert "default 0 80 no TRACE 0.512" in text and "49d8d6fa" not in text  # words in place of ids and True or False
    assert [given["src"] for tag, given in found.tags if tag == "img"] == ["figure-scaling.png"]
    assert (tmp_path / "report/figure-scaling.png").read_bytes() == PIXEL


def test_published_numbers_are_beside_ours_only_if_the_same_thing_was_run(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "played"
    shutil.copytree(project, root)
    known = published.read_published()
    benchmark = known.tables["tau2"].benchmark
    publish_json(root / "results/spec.yaml", {"benchmark": benchmark, "base": {"model": "another"}})
    build(root, tmp_path / "report")
    text = " ".join(view(tmp_path / "report", "published").text.split())
    assert "47.0" in text and "24.0 is airline's" in text and "there are no numbers of ours beside them" in text
    assert "57.7" not in text
    publish_json(root / "results/spec.yaml", {"benchmark": benchmark, "base": {"model": known.model}})
    build(root, tmp_path / "report")
    text = " ".join(view(tmp_path / "report", "published").text.split())
    assert "TRACE 44.0 not run here 48.2 not run here 47.0 57.7 (6 tasks)" in text


def test_the_overview_and_the_terminal_show_the_same_readings(
    project: Path, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("COLUMNS", "200")  # so that no reading is wrapped
    monkeypatch.setattr("sys.argv", ["captrain", "results", "--all"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert not end.value.code
    said = re.findall(r"(differs|no reliable difference|no bound here) *$", capsys.readouterr().out, re.M)
    cells = re.findall(r'<td class="reading">([^<]*)</td>', (report / "index.html").read_text())
    assert sorted(said) == sorted(cells)
    assert {"differs", "no reliable difference"} <= {*said}
    text = " ".join(view(report, "overview").text.split())
    assert "TRACE in this run: +0.203 to base (differs); -0.026 to GRPO on target (no" in text


def test_the_first_screen_has_at_most_40_lines_of_80_columns_and_no_name_is_wrapped(
    committed: Path, captrain: Captrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = captrain(committed, "results")
    lines = out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    rates = [float(found[1]) for line in lines if (found := re.search(r"  (\d\.\d{3})  \d\.\d{3} to", line))]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 7
    assert re.search(r"^ +TRACE, solutions, routed  ", out, re.M) and re.search(r"^ +missing_write +Omitted", out, re.M)
    assert re.search(r"^  captrain results --all ", out, re.M)
    best, second = re.findall(r"^ (\S.*?)  +\d\.\d{3}  ", out, re.M)[:2]
    assert re.search(rf"Difference of {best} *$(?:\n  to .*)*\n  to {second} ", out, re.M)


def test_everything_is_printed_in_sections_whose_lines_fit_80_columns_uncut(
    committed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(committed)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["captrain", "results", "--all"])
    with pytest.raises(SystemExit):
        app.main()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    sections = ("Test split, best", "Other routers", "What each row learns", "Paired differences", "Does repairing")
    places = [out.index(section) for section in sections]
    assert places == sorted(places)
    rates = [float(found) for found in re.findall(r"^\w.*?  (\d\.\d{3})  \d\.\d{3} to", out[: places[1]], re.M)]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 7
    assert re.search(r"^  rejection SFT on target +[+-]\d\.\d{3} .* differs *$", out, re.M)


def test_what_was_spent_is_a_line_of_80_columns_a_row(
    committed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(committed)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["captrain", "results", "--spent"])
    with pytest.raises(SystemExit):
        app.main()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^TRACE, solutions, routed +[\d,]+ +\d", out, re.M) and "\nstages gepa: GEPA" in out


@pytest.mark.parametrize("field", ["floor", "outcomes", "kinds"])
def test_a_summary_of_rollouts_that_lacks_a_field_is_refused(field: str, tmp_path: Path) -> None:
    rates = {"pass_rate": 0.5, "mean_reward": 0.5}
    summary = {**rates, "floor": rates, "outcomes": {}, "kinds": {}, "benchmark": {"version": "7"}}
    path = tmp_path / "results/rollouts/summary.json"
    publish_json(path, summary)
    tables.results(tmp_path)
    publish_json(path, {name: value for name, value in summary.items() if name != field})
    with pytest.raises(UserError, match=field):
        tables.results(tmp_path)


def test_the_causal_test_is_printed_beneath_the_table(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("COLUMNS", "170")
    monkeypatch.setattr("sys.argv", ["captrain", "results", "--all"])
    with suppress(SystemExit):
        app.main()
    out = capsys.readouterr().out
    assert "Does repairing a capability alone" in out and "check first\n" in re.sub(" {2,}.*", "", out)
    assert "claims 0.400 of the failures  0.300 to 0.500" in out


def test_each_capability_shows_what_it_claims_and_what_its_adapter_repairs(report: Path) -> None:
    text = " ".join(view(report, "capabilities").text.split())
    assert "check first 30 of 90 0.400 0.300 to 0.500" in text and "above placebo" in text
    own = " ".join(view(report, "capability-check_first").text.split())
    assert "failed, lacks it +0.400" in own and "failed, does not lack it +0.000" in own and "passed +0.000" in own
    assert "Not tested" in view(report, "capability-be_polite").text


def cut(text: str) -> str:
    return text[: 2 * len(text) // 3].rstrip()


CORRUPT = {
    "capabilities/selection.json": "capabilities",
    "capabilities/capabilities.jsonl": "capabilities",
    "labels/candidates.jsonl": "labels",
    "environments/check_first.passport.json": "environments",
    "adapters/index.json": "adapters",
    "adapters/history.csv": "adapters",
    "gepa/index.json": "gepa",
    "routes/routes.csv": "routes",
    "evaluation/metrics.json": "comparison",
    "evaluation/main.csv": "comparison",
    "evaluation/differences.csv": "comparison",
    "evaluation/kinds.csv": "comparison",
    "evaluation/spent.csv": "comparison",
    "evaluation/ledger.csv": "comparison",
    "causality/capabilities.csv": "causality",
    "causality/effects.csv": "causality",
    "spec.yaml": "compose",
    "replicates/summary.csv": "replicate",
    "sweeps/rollouts.csv": "captrain-sweep",
    "../artifacts/rollouts/discovery.jsonl": "rollouts",
    "../artifacts/labels/labels.jsonl": "labels",
    "../artifacts/played/trace/rollouts.jsonl": "evaluation@trace",
}


@pytest.fixture(scope="module")
def breakable(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with every file that the report may read."""
    root = tmp_path_factory.mktemp("breakable") / "project"
    shutil.copytree(project, root)
    row = {"digest": "beef", "path": "", "rollouts": 3200, "discarded": 0}
    publish_json(root / "results/gepa/index.json", {"gepa": row})
    publish_json(root / "results/spec.yaml", {"benchmark": {}, "base": {}})
    publish_text(root / "results/replicates/summary.csv", SUMMARY)
    publish_text(root / "results/sweeps/rollouts.csv", STUDY)
    build(root, root.parent / "whole")
    return root


@pytest.mark.parametrize("name", further(CORRUPT, 6))
def test_a_corrupt_file_is_named_with_the_command_that_makes_it(breakable: Path, name: str) -> None:
    path = (breakable / "results" / name).resolve()
    whole = path.read_text()
    others = {".json": ["\x00\x01", "[" * 5000, "3\n"], ".yaml": ["\x00\x01", "[" * 5000, "3\n"], ".jsonl": ["{\n"]}
    if path.parent.name in ("adapters", "evaluation", "causality"):
        others[".csv"] = ["a\n"]  # a complete table with other columns
    try:
        for text in (cut(whole), *others.get(path.suffix, [])):
            publish_text(path, text)
            with pytest.raises(UserError) as error:
                build(breakable, breakable.parent / "broken")
            assert str(path) in error.value.problem and "corrupt" in error.value.problem
            assert CORRUPT[name] in error.value.remedy
            assert not [*breakable.parent.glob("*broken*")]
    finally:
        publish_text(path, whole)


@pytest.mark.parametrize(
    ("name", "old", "new", "where"),
    [
        ("capabilities/selection.json", '"gap_low"', '"gap_lo"', "candidates.0.gap_low"),
        ("capabilities/selection.json", '"name": "', '"name": 3, "was": "', "candidates.0.name"),
        ("evaluation/main.csv", "pass_rate", "rate", "pass_rate"),
        ("evaluation/main.csv", "0.332", "much", "low"),
        ("evaluation/differences.csv", "True", "3", "distinguishable"),
        ("causality/capabilities.csv", "repaired,", "mended,", "repaired"),
        ("causality/effects.csv", "0.1,0.2", "0.1,much", "rate"),
        ("adapters/index.json", '"digest"', '"hash"', "check_first.digest"),
    ],
)
def test_a_wrong_column_or_value_is_named(breakable: Path, name: str, old: str, new: str, where: str) -> None:
    path = breakable / "results" / name
    whole = path.read_text()
    publish_text(path, whole.replace(old, new))
    try:
        with pytest.raises(UserError, match=re.escape(where)):
            build(breakable, breakable.parent / "broken")
    finally:
        publish_text(path, whole)


def test_the_report_of_a_project_that_never_ran_says_how_to_run_it(tmp_path: Path, captrain: Captrain) -> None:
    publish_text(tmp_path / "dvc.yaml", "stages: {}\n")
    status, out, _ = captrain(tmp_path, "report")
    assert status == 0 and "No stage has run here yet" in out and "`captrain run`" in out


def test_the_report_of_an_empty_project_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty", tmp_path / "report")
    for name, stage in {"overview": "comparison", "thresholds": "capabilities", "ledger": "comparison"}.items():
        assert f"dvc repro {stage}" in view(tmp_path / "report", name).text
    assert "dvc.yaml is missing" in view(tmp_path / "report", "provenance").text


def test_a_run_without_candidates_still_has_all_views(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "nothing"
    shutil.copytree(project, root)
    path = root / "results/capabilities/selection.json"
    publish_json(path, json.loads(path.read_text()) | {"candidates": []})
    publish_text(root / "results/adapters/history.csv", "adapter,step,rollouts,reward,success,informative\n")
    publish_json(root / "results/adapters/index.json", {})
    build(root, tmp_path / "report")
    assert "0 of 0 candidates were selected" in view(tmp_path / "report", "capabilities").text
    assert 'id="capability-' not in (tmp_path / "report/index.html").read_text()


def test_provenance_names_stage_command_and_hash(report: Path) -> None:
    text = view(report, "provenance").text
    assert "dvc repro comparison" in text and "ab95.dir" in text and "it has not run" in text
    targets = {given.get("id") for _, given in view(report, "provenance").tags}
    assert "stage-comparison" in targets


def test_a_folder_that_is_not_a_report_is_not_replaced(project: Path, report: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a report"):
        build(project, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    stale = report / "data/shard-999.js"
    stale.write_text("old")
    build(project, report)
    assert not stale.exists()


@pytest.mark.needs("browser")
def test_links_lead_from_the_table_to_the_failing_message_of_a_rollout(
    browser: Browser, report: Path, tmp_path: Path
) -> None:
    browser.events.clear()
    browser.screen(1280, 900)
    browser.open((report / "index.html").as_uri())
    assert "0.533 to 0.619" in browser.run("document.querySelector('main').innerText")
    browser.picture(tmp_path / "overview.png")
    assert not browser.run("performance.getEntriesByType('resource').some((one) => one.name.includes('/data/'))")
    browser.follow("#overview a[href='#capabilities']")
    browser.follow("#capabilities a[href='#capability-check_first']")
    browser.picture(tmp_path / "capability.png")
    browser.follow("#evidence-check_first ~ details a")
    browser.wait("document.body.dataset.opened")
    assert browser.run("document.title").startswith("Rollouts")
    failing = browser.run("document.querySelector('#panel .failing').innerText")
    assert "Fails here: check_first (LACKING in 5 of 5 runs)" in failing and "cancel(id=0)" in failing
    assert HOSTILE in browser.run("document.querySelector('#panel').innerText")
    browser.picture(tmp_path / "rollout.png")
    assert browser.faults() == []
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("overview", "capability", "rollout"))


@pytest.mark.needs("browser")
def test_the_table_filters_and_opens_by_keyboard_with_two_arms_side_by_side(browser: Browser, report: Path) -> None:
    browser.events.clear()
    browser.screen(1280, 900)
    browser.open((report / "index.html").as_uri() + "#rollouts")
    browser.wait("document.body.dataset.ready")
    assert browser.run("document.getElementById('count').textContent") == "54 of 54 rollouts"
    browser.run(
        "document.getElementById('search').value = 'test/4 base';"
        "document.getElementById('search').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.run("document.getElementById('count').textContent") == "2 of 54 rollouts"
    browser.run("document.getElementById('grid').focus()")
    for key in ("ArrowDown", "Enter"):
        browser.key(key)
    assert browser.wait("document.body.dataset.opened") == "ebase41"
    heads = browser.run("[...document.querySelectorAll('#panel h3')].map((one) => one.textContent)")
    assert heads == ["base: failed", "check_first: passed"]
    browser.key("Escape")
    assert browser.run("document.getElementById('panel').hidden && document.activeElement.id") == "grid"
    assert browser.faults() == []


def test_the_first_screen_says_what_is_lacking_which_row_is_best_and_what_limits_it(report: Path) -> None:
    text = " ".join(view(report, "overview").text.split())
    assert "When it fails, the agent lacks Check first (in 50% of failures), lacks Seldom" in text
    assert re.search(r"Best row \S.* passes 0\.\d+ of the test tasks", text) and "Caveat one seed, " in text
    page = (report / "index.html").read_text()
    rows = page.partition('aria-label="Main table"')[2].partition("</table>")[0]
    rates = [float(rate) for rate in re.findall(r'<td class="n">(0\.\d{3})</td>', rows)][:1] and [
        float(re.findall(r'<td class="n">([\d.]+)</td>', row)[0]) for row in rows.split("<tr")[2:]
    ]
    assert rates == sorted(rates, reverse=True) and len(rates) > 1
    assert "further rows: routers, merged adapters, controls and bounds" in page and "@media print" in page


@pytest.mark.needs("browser")
def test_a_capability_links_to_all_its_failures_and_the_address_holds_the_filters(
    browser: Browser, report: Path
) -> None:
    browser.events.clear()
    browser.screen(1280, 900)
    browser.open((report / "index.html").as_uri() + "#capability-check_first")
    browser.follow("#capability-check_first a[href='#rollouts?lacks=check_first']")
    browser.wait("document.body.dataset.ready")
    count = int(browser.run("document.getElementById('count').textContent").split()[0])
    assert 0 < count < 54 and browser.run("document.getElementById('lacks').value") == "check_first"
    browser.run(
        "document.getElementById('outcome').value = 'p';"
        "document.getElementById('outcome').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert browser.run("location.hash") == "#rollouts?outcome=p&lacks=check_first"
    assert browser.run("document.getElementById('count').textContent").startswith("0 of")
    assert browser.faults() == []


@pytest.mark.needs("browser")
def test_on_paper_no_table_is_cut_and_views_that_need_a_screen_are_left_out(browser: Browser, report: Path) -> None:
    browser.screen(720, 1000)
    browser.open((report / "index.html").as_uri())
    browser.ask("Emulation.setEmulatedMedia", media="print")
    try:
        tables = "[...document.querySelectorAll('#overview table, #capabilities table, #ledger table')]"
        assert browser.run(f"{tables}.filter((one) => one.getBoundingClientRect().right > innerWidth).length") == 0
        views = "[...document.querySelectorAll('.view')].filter((one) => one.checkVisibility()).map((one) => one.id)"
        shown = browser.run(views)
        assert {"overview", "capabilities", "ledger"} <= {*shown} and not {"rollouts", "thresholds"} & {*shown}
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="")


@pytest.mark.needs("browser")
def test_the_sliders_select_as_the_stage_does(browser: Browser, report: Path, project: Path) -> None:
    browser.events.clear()
    labels = load(project / rollouts.LABELS, RolloutLabels)
    for delta, coverage, agreement in [(0.2, 0.1, 3), (0.02, 0.02, 2), (0.6, 0.3, 4), (1.0, 0.9, 5)]:
        changed = LIMITS.model_copy(update={"delta": delta, "coverage": coverage, "agreement": agreement})
        expected = [one.id for one in select(labels, CANDIDATES, changed, 2, 0).capabilities]
        page = (report / "index.html").as_uri()
        browser.open(f"{page}#thresholds?delta={delta}&coverage={coverage}&agreement={agreement}")
        assert browser.run("document.body.dataset.selected").split() == expected
    assert browser.faults() == []


@pytest.mark.needs("browser")
def test_no_view_scrolls_sideways_on_a_phone_in_the_dark(browser: Browser, report: Path, tmp_path: Path) -> None:
    browser.events.clear()
    browser.screen(360, 740, dark=True)
    browser.open((report / "index.html").as_uri())
    names = browser.run("[...document.querySelectorAll('.view')].map((one) => one.id)")
    assert len(names) == 8 + len(CANDIDATES)
    for name in names:
        browser.run(f"location.hash = '{name}'")
        browser.wait(f"!document.getElementById('{name}').hidden")
        assert browser.run("document.querySelectorAll('.view:not([hidden])').length") == 1
        wide = browser.run("document.documentElement.scrollWidth")
        assert wide <= 360, (name, wide)
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        browser.picture(tmp_path / f"phone-{name}.png")
    assert browser.faults() == []


@pytest.mark.needs("browser")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_has_a_serious_barrier_to_a_reader_with_a_screen_reader_or_weak_eyes(
    browser: Browser, report: Path, dark: bool
) -> None:
    browser.screen(1280, 900, dark)
    browser.open((report / "index.html").as_uri())
    for name in browser.run("[...document.querySelectorAll('.view')].map((one) => one.id)"):
        browser.run(f"location.hash = '{name}'")
        browser.wait(f"!document.getElementById('{name}').hidden")
        assert browser.barriers() == [], name
