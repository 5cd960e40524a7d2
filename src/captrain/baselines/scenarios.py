"""Environments in the published layout of the Agent World Model, as environments of ours.

A folder holds JSONL files that are joined on `scenario`: gen_tasks (what is asked for), gen_db (tables), gen_sample
(rows), gen_spec (operations), gen_envs (source of an ASGI application over the tables) and gen_verifier.pure_code (for
each task a function that compares the database before and after). gen_scenario describes scenarios and is not needed;
gen_verifier without `pure_code` asks a language model, and is not read.

Each scenario becomes one self-contained file: our driver, and the published texts as data. The application is run as
what it says it is, an ASGI application: the driver speaks that protocol to it, and every database that it opens lies in
memory. So nothing stands in for FastAPI or SQLAlchemy, and what an application imports must be there where it runs: in
the sandbox, since nobody has vouched for it: FastAPI, Pydantic and SQLAlchemy, if they are installed beside this
package. A scenario that lacks something is refused, by name. Tasks that their verifier finds done on the untouched
database, or where it raises, are left out, and the passport counts them.
"""

import ast
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from captrain.benchmarks import load_benchmark
from captrain.config import Spec
from captrain.contract import Target
from captrain.environments import HeldOutTasks, Standard, Subject, failed_check, make_standard, passport_page, probes
from captrain.environments.sandbox import MODULES, installed_packages, load_confined
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Check, Passport, publish_json, publish_text

LAYOUT = ("gen_tasks", "gen_db", "gen_sample", "gen_spec", "gen_envs", "gen_verifier.pure_code")
LAYOUT_REMEDY = "give a folder in the layout of the Agent World Model, or leave baselines.awm.source empty"


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    scenario: str


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tasks(_Row):
    """What is asked for in a scenario."""

    tasks: list[str]


class Table(_Part):
    """A table, and what belongs to it."""

    ddl: str
    indexes: list[str] = []
    examples: list[str] = []


class Schema(_Part):
    """All tables."""

    tables: list[Table]


class Database(_Row):
    """The tables of a scenario."""

    db_schema: Schema


class Inserts(_Part):
    """The rows of one table."""

    insert_statements: list[str]


class Rows(_Part):
    """The rows of all tables."""

    tables: list[Inserts]


class Sample(_Row):
    """The rows of a scenario."""

    sample_data: Rows


class Parameter(_Part):
    """A parameter of an operation."""

    type: str = "string"
    param_type: str = "query"
    required: bool = False
    description: str = ""


class Endpoint(_Part):
    """An operation."""

    path: str
    method: str
    operation_id: str
    summary: str = ""
    description: str = ""
    request_params: dict[str, Parameter] = {}


class Group(_Part):
    """Operations."""

    endpoints: list[Endpoint]


class Groups(_Part):
    """All operations."""

    api_groups: list[Group]


class Api(_Row):
    """The operations of a scenario, as they were specified."""

    api_spec: Groups


class Source(_Row):
    """The application of a scenario."""

    full_code: str


class Code(_Part):
    """A verifier's source."""

    code: str


class Verifier(_Row):
    """The verifier of one task."""

    task_idx: int
    verification: Code


KINDS: dict[str, type[_Row]] = dict(zip(LAYOUT, (Tasks, Database, Sample, Api, Source, Verifier), strict=True))
TYPES = {"int": "integer", "integer": "integer", "float": "number", "number": "number", "bool": "boolean",
         "boolean": "boolean", "array": "array", "list": "array", "object": "object", "dict": "object"}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """One scenario, joined: its name, what makes its database, the source of its application, its operations by name,
    and its tasks, each with its verifier."""

    name: str
    statements: list[str]
    code: str
    routes: dict[str, dict[str, Any]]
    tasks: list[dict[str, str]]


def slug(name: str) -> str:
    """A scenario's name as the files are joined on it: lower case, one underscore for what is no letter or digit."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def scenarios(folder: Path) -> list[Scenario]:
    """All scenarios that every file of a folder knows, in the order of their tasks' file.

    Raises:
        UserError: a file is missing, a line is not of the layout, or no scenario is in all files.
    """
    rows = {name: _rows(folder / f"{name}.jsonl", kind) for name, kind in KINDS.items()}
    one: dict[str, dict[str, Any]] = {
        name: {slug(row.scenario): row for row in found} for name, found in rows.items() if name != LAYOUT[-1]
    }
    checks: dict[str, dict[int, str]] = {}
    for row in rows[LAYOUT[-1]]:
        assert isinstance(row, Verifier)
        checks.setdefault(slug(row.scenario), {})[row.task_idx] = row.verification.code
    joined = [name for name in one["gen_tasks"] if name in checks and all(name in found for found in one.values())]
    if not joined:
        raise UserError(f"no scenario is in all of {', '.join(LAYOUT)} of {folder}", LAYOUT_REMEDY)
    return [_scenario(name, {kind: found[name] for kind, found in one.items()}, checks[name]) for name in joined]


def _rows(path: Path, kind: type[_Row]) -> list[_Row]:
    if not path.is_file():
        raise UserError(f"{path} is missing", LAYOUT_REMEDY)
    found: list[_Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found += [kind.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = f"{first['msg']}{f' at {where}' if where else ''}"
            raise UserError(f"{path}, line {number} is not of the layout ({problem})", LAYOUT_REMEDY) from None
    return found


def _scenario(name: str, found: Mapping[str, Any], checks: Mapping[int, str]) -> Scenario:
    schema, sample = found["gen_db"].db_schema, found["gen_sample"].sample_data
    made = [statement for table in schema.tables for statement in (table.ddl, *table.indexes, *table.examples)]
    rows = [statement for table in sample.tables for statement in table.insert_statements]
    endpoints = [one for group in found["gen_spec"].api_spec.api_groups for one in group.endpoints]
    asked = enumerate(found["gen_tasks"].tasks)
    return Scenario(
        name=name,
        statements=[*made, "PRAGMA foreign_keys = ON", *rows],
        code=found["gen_envs"].full_code,
        routes={endpoint.operation_id: _route(endpoint) for endpoint in endpoints},
        tasks=[{"task": task, "check": checks[at]} for at, task in asked if at in checks],
    )


def _route(endpoint: Endpoint) -> dict[str, Any]:
    """An operation as the driver takes it, from its specification."""
    given = endpoint.request_params

    def where(place: str) -> list[str]:
        return [name for name, one in given.items() if one.param_type == place]

    required = [name for name, one in given.items() if one.required]
    properties = {
        name: {"type": TYPES.get(one.type, "string"), "description": one.description} for name, one in given.items()
    }
    return {
        "path": endpoint.path, "method": endpoint.method.upper(), "in_path": where("path"), "in_query": where("query"),
        "description": endpoint.description or endpoint.summary,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }  # fmt: skip


def text_of(scenario: Scenario) -> str:
    """The self-contained environment file of a scenario."""
    driver = files("captrain").joinpath("baselines/templates/scenario.py.txt").read_text()
    header = f'"""The scenario {scenario.name} of the Agent World Model, with a driver of ours.\n\nDo not edit.\n"""\n'
    packages = f"PACKAGES = {imported(scenario.code)!r}\n"
    return f"{header}\n{packages}SCENARIO = {asdict(scenario)!r}\n{driver}"


def imported(code: str) -> list[str]:
    """The packages that a source imports beyond the modules that the sandbox has."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):
        return []
    # What runs the server is imported where the source is a program of its own, which it is not here.
    main = {inner for node in nodes if isinstance(node, ast.If) for inner in ast.walk(node)}
    names = [alias.name for node in nodes if isinstance(node, ast.Import) and node not in main for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node not in main]
    known = {module.partition(".")[0] for module in MODULES}
    return sorted({name.partition(".")[0] for name in ["sqlite3", *names]} - known)


def published_scenarios(source: Path, spec: Spec, folder: Path) -> list[Passport]:
    """The first scenarios of a folder, as many as are asked for, that can be played; written to `folder` with their
    passports, the findings of others said.

    Raises:
        UserError: the folder is not of the layout, the sandbox is weaker than asked for, or fewer scenarios than asked
            for can be played: it says what the first of the others lacks.
    """
    benchmark = load_benchmark(spec.benchmark, spec.machine)
    tests = make_standard(benchmark, spec.evaluation.tasks, spec.environments).tests
    passed, complaints = list[Passport](), list[str]()
    for scenario in scenarios(source):
        if absent := [name for name in imported(scenario.code) if name not in installed_packages()]:
            complaints.append(f"{scenario.name} imports {', '.join(absent)}, which the sandbox does not have")
            continue
        passport, text = examined_scenario(scenario, folder, spec, tests)
        if passport.passed:
            publish_json(folder / f"{passport.capability}.passport.json", passport)
            publish_text(folder / f"{passport.capability}.md", passport_page(passport, text))
            passed.append(passport)
        else:
            (folder / f"{passport.capability}.py").unlink()
            complaints.append(f"{scenario.name}: {passport.complaints()}")
        if len(passed) == spec.baselines.awm.environments:
            break
    for complaint in complaints:
        print(complaint)
    if len(passed) < spec.baselines.awm.environments:
        raise UserError(
            f"{len(passed)} scenarios of {source} can be played, and {spec.baselines.awm.environments} are asked for "
            f"({complaints[0] if complaints else 'there are no more'})",
            "ask for fewer (baselines.awm.environments), or leave baselines.awm.source empty: environments of our own",
        )
    return passed


def examined_scenario(scenario: Scenario, folder: Path, spec: Spec, tests: HeldOutTasks) -> tuple[Passport, str]:
    """Write a scenario without the tasks whose verifier is wrong, and check what can be checked where no reference
    solution is known.

    Raises:
        UserError: the sandbox is weaker than asked for.
    """
    path = folder / f"{scenario.name}.py"
    text, checks, fingerprint = text_of(scenario), list[Check](), ""
    publish_text(path, text)
    try:
        kept = sound(scenario, load_confined(path, spec.machine.sandbox))
        left = len(scenario.tasks) - len(kept)
        detail = f"{left} left out: done on the untouched database, or their verifier raised"
        checks.append(Check(name="tasks", passed=bool(kept), measured=len(kept), bound="at least 1", detail=detail))
        if kept:
            text = text_of(Scenario(**{**asdict(scenario), "tasks": kept}))
            publish_text(path, text)
            target = load_confined(path, spec.machine.sandbox)
            fingerprint = target.fingerprint
            checks += inspected(target, path, Standard(target.tools, tests, spec.environments), len(kept))
    except EnvironmentFault as fault:
        checks.append(failed_check("it plays", fault))
    passport = Passport(
        capability=scenario.name, environment=fingerprint, attempt=0, trusted=False, calibration_tasks=0, checks=checks,
        passed=all(check.passed for check in checks),
    )  # fmt: skip
    return passport, text


def sound(scenario: Scenario, target: Target) -> list[dict[str, str]]:
    """The tasks that are not done before anything is done, and whose verifier does not raise there."""
    kept = []
    tasks = target.tasks("training", len(scenario.tasks)) if scenario.tasks else []
    for task, asked in zip(tasks, scenario.tasks, strict=True):
        score = target.floor(task)
        if not score.success and not score.parts["raised"]:
            kept.append(asked)
    return kept


def inspected(target: Target, path: Path, against: Standard, count: int) -> list[Check]:
    """Checks of a playable scenario: the same calls meet the same observations, and no test task is in it."""
    subject = Subject(target, path, against, ())
    tasks = target.tasks("training", count)

    def play(at: int) -> Any:
        return subject.act(tasks[at], probes.random_agent(target.tools, random.Random(f"random/{at}")))

    different = [tasks[at].id for at in range(count) if play(at) != play(at)]
    named = against.tests.named(path.read_text())
    refusals = int(target.about["statements refused"])
    return [
        Check(
            name="same play, same observations", passed=not different, measured=float(not different), bound="1",
            detail="random calls meet other observations" if different else "", task=next(iter(different), ""),
        ),
        Check(name="ids of test tasks", passed=not named, measured=float(bool(named)), bound="at most 0", detail=named),
        Check(
            name="statements that the schema refuses", passed=True, measured=float(refusals), bound="none advised",
            detail="they are left out" if refusals else "",
        ),
    ]  # fmt: skip
