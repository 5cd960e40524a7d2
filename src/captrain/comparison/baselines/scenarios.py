"""Convert environments in the published layout of the Agent World Model.

A folder holds JSONL files, joined on `scenario`:

- gen_tasks: the requests.
- gen_db: tables. gen_sample: rows.
- gen_spec: operations. gen_envs: source of an ASGI application over the tables.
- gen_verifier.pure_code: for each task a function that compares the database before and after.

gen_scenario is not needed. gen_verifier without `pure_code` asks a language model and is not read.

Each scenario becomes one self-contained file: our driver, and the published texts as data. The driver speaks ASGI to
the application, whose databases are in memory. The application is untrusted, so it runs in the sandbox, with the real
FastAPI, Pydantic and SQLAlchemy, which must be installed beside this package. A scenario with a missing package is
skipped by name. A task is left out if its verifier passes or raises on the untouched database; the passport counts
them.
"""

import ast
import random
import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AliasPath, BaseModel, Field

from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment
from captrain.environments import (
    Evidence,
    HeldOutTasks,
    Standard,
    act_randomly,
    failed_check,
    make_standard,
    passport_page,
)
from captrain.environments.sandbox import MODULES, installed_packages, load_confined
from captrain.errors import EnvironmentFault, UserError
from captrain.records import CheckResult, JsonObject, Message, Passport, load, publish_json, publish_text
from captrain.run import Spec

LAYOUT = ("gen_tasks", "gen_db", "gen_sample", "gen_spec", "gen_envs", "gen_verifier.pure_code")
LAYOUT_REMEDY = "give a folder in the layout of the Agent World Model, or leave baselines.awm.source empty"


class _Row(BaseModel):
    scenario: str


AnyRow = TypeVar("AnyRow", bound=_Row)


class Tasks(_Row):
    """Line of gen_tasks."""

    tasks: list[str]


class Table(BaseModel):
    """A table with its indexes and example rows."""

    ddl: str
    indexes: list[str] = []
    examples: list[str] = []


class Database(_Row):
    """Line of gen_db."""

    tables: Annotated[list[Table], Field(validation_alias=AliasPath("db_schema", "tables"))]


class Inserts(BaseModel):
    """Rows of one table."""

    insert_statements: list[str]


class Sample(_Row):
    """Line of gen_sample."""

    tables: Annotated[list[Inserts], Field(validation_alias=AliasPath("sample_data", "tables"))]


class Parameter(BaseModel):
    """Parameter of an operation."""

    type: str = "string"
    param_type: str = "query"
    required: bool = False
    description: str = ""


class Operation(BaseModel):
    """Operation of a scenario."""

    path: str
    method: str
    operation_id: str
    summary: str = ""
    description: str = ""
    request_params: dict[str, Parameter] = {}


class OperationGroup(BaseModel):
    """Group of operations."""

    endpoints: list[Operation]


class Api(_Row):
    """Line of gen_spec."""

    groups: Annotated[list[OperationGroup], Field(validation_alias=AliasPath("api_spec", "api_groups"))]


class Application(_Row):
    """Line of gen_envs."""

    full_code: str


class Verifier(_Row):
    """Line of gen_verifier.pure_code: the verifier of one task."""

    task_idx: int
    code: Annotated[str, Field(validation_alias=AliasPath("verification", "code"))]


TYPES = {name: name for name in ("integer", "number", "boolean", "array", "object")}
TYPES |= {"int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


@dataclass(frozen=True)
class Scenario:
    """One scenario, joined over all files.

    Args:
        name: name of the scenario.
        statements: SQL that makes the database.
        code: source of the application.
        routes: operations by name, in the driver's form.
        tasks: each with its request and its verifier.
    """

    name: str
    statements: list[str]
    code: str
    routes: dict[str, JsonObject]
    tasks: list[dict[str, str]]


def scenarios(folder: Path) -> list[Scenario]:
    """Read the scenarios that are in every file of a folder, in the order of gen_tasks.

    Raises:
        UserError: a file is missing, a line is malformed, or no scenario is in all files.
    """
    requests = _by_scenario(folder / "gen_tasks.jsonl", Tasks)
    databases = _by_scenario(folder / "gen_db.jsonl", Database)
    samples = _by_scenario(folder / "gen_sample.jsonl", Sample)
    apis = _by_scenario(folder / "gen_spec.jsonl", Api)
    sources = _by_scenario(folder / "gen_envs.jsonl", Application)
    checks: dict[str, dict[int, str]] = {}
    for verifier in load(folder / "gen_verifier.pure_code.jsonl", Verifier, LAYOUT_REMEDY):
        checks.setdefault(_slug(verifier.scenario), {})[verifier.task_idx] = verifier.code
    joined: list[Scenario] = []
    for name, request in requests.items():
        if not all(name in rows for rows in (databases, samples, apis, sources, checks)):
            continue
        tables, groups = databases[name].tables, apis[name].groups
        # Tables first, then rows with foreign keys checked.
        statements = [statement for table in tables for statement in (table.ddl, *table.indexes, *table.examples)]
        statements.append("PRAGMA foreign_keys = ON")
        statements += [statement for table in samples[name].tables for statement in table.insert_statements]
        routes = {endpoint.operation_id: _route(endpoint) for group in groups for endpoint in group.endpoints}
        pairs = [(task, checks[name].get(index)) for index, task in enumerate(request.tasks)]
        tasks = [{"task": task, "check": check} for task, check in pairs if check is not None]
        joined.append(Scenario(name, statements, sources[name].full_code, routes, tasks))
    if not joined:
        raise UserError(f"no scenario is in all of {', '.join(LAYOUT)} of {folder}", LAYOUT_REMEDY)
    return joined


def _slug(name: str) -> str:
    """Return the join key of a scenario's name: lower case, with underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _by_scenario(path: Path, kind: type[AnyRow]) -> dict[str, AnyRow]:
    return {_slug(row.scenario): row for row in load(path, kind, LAYOUT_REMEDY)}


def _route(endpoint: Operation) -> JsonObject:
    """Convert an operation to the driver's form."""
    parameters = endpoint.request_params
    properties = {
        name: {"type": TYPES.get(parameter.type, "string"), "description": parameter.description}
        for name, parameter in parameters.items()
    }
    required = [name for name, parameter in parameters.items() if parameter.required]
    return {
        "path": endpoint.path,
        "method": endpoint.method.upper(),
        "in_path": [name for name, parameter in parameters.items() if parameter.param_type == "path"],
        "in_query": [name for name, parameter in parameters.items() if parameter.param_type == "query"],
        "description": endpoint.description or endpoint.summary,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


def text_of(scenario: Scenario) -> str:
    """Return the text of a scenario's environment file."""
    driver = files("captrain").joinpath("comparison/baselines/templates/scenario.py.txt").read_text(encoding="utf-8")
    header = f'"""The scenario {scenario.name} of the Agent World Model, with a driver of ours.\n\nDo not edit.\n"""\n'
    packages = f"PACKAGES = {imported(scenario.code)!r}\n"
    return f"{header}\n{packages}SCENARIO = {asdict(scenario)!r}\n{driver}"


def imported(code: str) -> list[str]:
    """List the packages that a source imports and the sandbox does not always have."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):
        return []
    # Imports below `if` start the server, which does not happen here.
    main = {inner for node in nodes if isinstance(node, ast.If) for inner in ast.walk(node)}
    names = [alias.name for node in nodes if isinstance(node, ast.Import) and node not in main for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node not in main]
    available = {module.partition(".")[0] for module in MODULES}
    return sorted({name.partition(".")[0] for name in ["sqlite3", *names]} - available)


def published_scenarios(source: Path, count: int, spec: Spec, folder: Path) -> list[Passport]:
    """Write the first `count` playable scenarios to `folder` with their passports, and print why others fail.

    Raises:
        UserError: the folder has another layout, the sandbox is weaker than the setting demands, or fewer than `count`
            scenarios are playable.
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
        if len(passed) == count:
            break
    for complaint in complaints:
        print(complaint)
    if len(passed) < count:
        raise UserError(
            f"{len(passed)} scenarios of {source} can be played, but {count} are needed "
            f"({complaints[0] if complaints else 'there are no more'})",
            "lower the row's `environments`, or leave its `source` empty to draw environments of our own",
        )
    return passed


def examined_scenario(scenario: Scenario, folder: Path, spec: Spec, tests: HeldOutTasks) -> tuple[Passport, str]:
    """Write a scenario without the tasks whose verifier is wrong, and check what needs no reference solution.

    Raises:
        UserError: the sandbox is weaker than the setting demands.
    """
    path = folder / f"{scenario.name}.py"
    text, checks, fingerprint = text_of(scenario), list[CheckResult](), ""
    publish_text(path, text)
    try:
        # 1. Keep tasks whose verifier neither passes nor raises on the untouched database.
        target, sound = load_confined(path, spec.machine.sandbox), list[dict[str, str]]()
        tasks = target.tasks("training", len(scenario.tasks)) if scenario.tasks else []
        for task, source in zip(tasks, scenario.tasks, strict=True):
            score = target.floor(task)
            if not score.success and not score.parts["raised"]:
                sound.append(source)
        discarded = len(scenario.tasks) - len(sound)
        detail = f"{discarded} left out: done on the untouched database, or their verifier raised"
        checks.append(
            CheckResult(name="tasks", passed=bool(sound), measured=len(sound), bound="at least 1", detail=detail)
        )
        # 2. The scenario with these tasks alone.
        if sound:
            text = text_of(replace(scenario, tasks=sound))
            publish_text(path, text)
            target = load_confined(path, spec.machine.sandbox)
            fingerprint = target.fingerprint
            checks += inspected(target, path, Standard(target.tools, tests, spec.environments), len(sound))
    except EnvironmentFault as fault:
        checks.append(failed_check("it plays", fault))
    passport = Passport(
        capability=scenario.name,
        environment=fingerprint,
        attempt=0,
        trusted=False,
        calibration_tasks=0,
        checks=checks,
        passed=all(check.passed for check in checks),
    )
    return passport, text


def inspected(target: CheckedEnvironment, path: Path, against: Standard, count: int) -> list[CheckResult]:
    """Check a playable scenario: equal calls give equal observations, and no test task is quoted."""
    subject = Evidence(target, path, against, ())
    tasks = target.tasks("training", count)

    def play(index: int) -> list[Message]:
        return subject.act(tasks[index], partial(act_randomly, target.tools, random.Random(f"random/{index}")))

    different = [tasks[index].id for index in range(count) if play(index) != play(index)]
    leaked = against.tests.quoted_id(path.read_text(encoding="utf-8"))
    refusals = int(target.about["statements refused"])
    return [
        CheckResult(
            name="same play, same observations",
            passed=not different,
            measured=float(not different),
            bound="1",
            detail="random calls meet other observations" if different else "",
            task=next(iter(different), ""),
        ),
        CheckResult(
            name="ids of test tasks", passed=not leaked, measured=float(bool(leaked)), bound="at most 0", detail=leaked
        ),
        CheckResult(
            name="statements that the schema refuses",
            passed=True,
            measured=float(refusals),
            bound="none advised",
            detail="they are left out" if refusals else "",
        ),
    ]
