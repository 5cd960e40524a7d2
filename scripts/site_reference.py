"""A hook for mkdocs: write the reference pages from the code when the site is built, so that they are never outdated.

A page asks for a part by a line `<!-- reference: NAME -->`, where NAME is a key of `PARTS`.
"""

import csv
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel, TypeAdapter
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

import captrain
from captrain.cli import app
from captrain.run import Component, Spec, component_class

GROUPS = ("benchmark", "policy", "analyst", "synthesizer", "trainer", "router", "machine")
CAUSES = {".png": "a figure", ".pdf": "a figure", ".py": "an environment", ".md": "a page", ".yaml": "settings"}
MOST_KEYS = 12
PACKAGES = re.compile(r"\b[a-z_]\w*(?:\.\w+)*\.")
"""What stands before the name of a type."""
ASKED = re.compile(r"<!-- reference: (\w+) -->")
SETTING = re.compile(r"^( *)([\w.]+):(?: *([^#\n]*?))?(?: *# *(.*))?$")
"""A line of YAML: indentation, key, value, comment."""


def cell(text: object) -> str:
    """Return a text as the cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    names = head.split(", ")
    lines = [names, ["---"] * len(names), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def commands(root: Path) -> str:
    """Describe every command of the command line, with its arguments and options."""
    return "\n".join(_commands(typer.main.get_command(app.app), "captrain"))


def _commands(command: object, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for each, inner in command.commands.items():
            yield from _commands(inner, f"{name} {each}")
    elif isinstance(command, TyperCommand):
        rows = [_parameter(each) for each in command.params if isinstance(each, TyperArgument | TyperOption)]
        described = inspect.cleandoc(command.help or "").replace("\b", "").replace("\f", "")
        yield f"### {name}\n{described}\n\n" + (table("argument or option, meaning", rows) if rows else "")


def _parameter(parameter: TyperArgument | TyperOption) -> list[str]:
    names = parameter.opts if isinstance(parameter, TyperOption) else [str(parameter.name).upper()]
    has_default = parameter.default not in (None, False, "", []) and not callable(parameter.default)
    default = f" Default: `{parameter.default}`." if has_default else ""
    required = " Required." if parameter.required else ""
    return [", ".join(f"`{name}`" for name in names), f"{parameter.help or ''}{required}{default}"]


def targets(root: Path) -> str:
    """List the targets of the Makefile."""
    found = re.findall(r"^([a-z-]+):.*## (.*)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return table("target, what it does", ([f"`make {name}`", text] for name, text in found))


def settings(root: Path) -> str:
    """List every setting with its default, its values and its meaning, file by file."""
    parts = [_file_of_settings("conf/config.yaml", root / "conf/config.yaml", _values)]
    for group in GROUPS:
        for path in sorted((root / "conf" / group).glob("*.yaml")):
            is_section = group == "machine"
            allowed = _values if is_section else _of_component(path)
            parts.append(_file_of_settings(f"{group}={path.stem}", path, allowed, "machine." if is_section else ""))
    return "\n".join(parts)


def _file_of_settings(title: str, path: Path, allowed: Callable[[str], str], prefix: str = "") -> str:
    """Describe a file of conf/: its opening comment, and its settings."""
    head = "\n".join(line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return f"### {title}\n{head}\n\n" + table("setting, default, values, meaning", _rows(path, allowed, prefix))


def _rows(path: Path, allowed: Callable[[str], str], prefix: str = "") -> Iterator[list[str]]:
    """Yield the settings of a YAML file. Comments are those at the end of a line."""
    above: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = SETTING.match(line)
        if match is None or match[2] in ("defaults", "_target_"):
            continue
        indent, key, value, comment = len(match[1]), match[2], match[3] or "", match[4] or ""
        above = [(depth, name) for depth, name in above if depth < indent]
        name = prefix + ".".join([*(each for _, each in above), key])
        if value and not value.startswith("&"):
            yield [f"`{name}`", f"`{value}`", allowed(name), comment]
        else:
            above.append((indent, key))


def _values(name: str) -> str:
    """Return the values that a setting of the specification may have."""
    kind: object = Spec
    described = ""
    for part in name.split("."):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or part not in kind.model_fields:
            return ""
        field = kind.model_fields[part]
        kind = field.annotation
        described = _described(field.rebuild_annotation())
    return described


def _of_component(path: Path) -> Callable[[str], str]:
    """Return what names the values of a component's settings: its constructor."""
    target = yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_")
    if target is None:
        return lambda name: ""
    parameters = inspect.signature(component_class(Component(_target_=target)), eval_str=True).parameters
    return lambda name: _described(parameters[name].annotation) if name in parameters else ""


def _described(annotation: type[object]) -> str:
    """Describe a type by its JSON schema."""
    try:
        schema = TypeAdapter(annotation).json_schema()
    except Exception:  # a component, or a type without a schema
        return ""
    kinds = [_kind(each) for each in schema.get("anyOf", [schema])]
    return " or ".join(filter(None, kinds))


def _kind(schema: dict) -> str:
    """Describe one type of a JSON schema."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = " and ".join(f"{words} {schema[key]:g}" for key, words in bounds.items() if schema.get(key, 10**9) < 10**9)
    return f"{schema.get('type', '')} {limits}".strip()


def python(root: Path) -> str:
    """Describe what `import captrain` offers."""
    parts = []
    for name in sorted(set(captrain.__all__) - {"__version__"}):
        thing = getattr(captrain, name)
        signature = "" if inspect.isclass(thing) else PACKAGES.sub("", str(inspect.signature(thing)))
        parts.append(f"### captrain.{name}\n```text\n{name}{signature}\n\n{inspect.getdoc(thing)}\n```\n")
    return "\n".join(parts)


def files(root: Path) -> str:
    """List the files that each stage writes into results/, with the columns or keys of each."""
    parts = []
    for name, stage in yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"].items():
        outputs = [*stage.get("plots", []), *stage.get("metrics", []), *stage.get("outs", [])]
        places = [each if isinstance(each, str) else next(iter(each)) for each in outputs]
        rows = [row for place in places for row in _contents(root, place)]
        if rows:
            parts.append(f"### {name}\n{stage['desc']}.\n\n" + table("file, holds", rows))
    return "\n".join(parts)


def _contents(root: Path, place: str) -> Iterator[list[str]]:
    """Yield each file below a place, with what it holds."""
    path = root / place
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            yield [f"`{each.relative_to(root)}`", _holds(each)]


def _holds(path: Path) -> str:
    """Return the columns of a table, or the keys of a record or of the first record."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return ", ".join(next(csv.reader(file), []))
    if path.suffix in (".json", ".jsonl"):
        text = path.read_text(encoding="utf-8")
        content = json.loads((text.splitlines() or ["{}"])[0] if path.suffix == ".jsonl" else text)
        return ", ".join(list(content)[:MOST_KEYS]) if isinstance(content, dict) else "a list"
    return CAUSES.get(path.suffix, "")


PARTS = {part.__name__: part for part in (commands, targets, settings, python, files)}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the parts in the place of the lines that ask for them."""
    root = Path(config.config_file_path).parent
    return ASKED.sub(lambda match: PARTS[match[1]](root), markdown)
