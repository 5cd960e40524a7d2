"""The template synthesizer: environments that a program writes, without a model.

For the embedded benchmark there is one template per capability or pair of them.

A written file is self-contained: the service desk's own source, whole, and after it the template's tasks and reward.
So tools, policy and result shapes are the target's by construction, and the other capabilities' rules stay binding: no
template pays for skipping them. Attempts step through a ladder of difficulty, for a passport that found the spread of
rewards on the base out of bounds; pairs, which are not played on the base, have no such ladder.

Some capabilities can be asked for with any operation, and their templates ask for one. Where the evidence failed at
steps of others, so that the passport found too few of these in the tasks, further attempts ask for them as well.

For another benchmark there are no templates: its environments are derived from itself, if its class stands on its own,
or is one of ours that run in workers and have reference solutions. A derived file holds the source of the benchmark's
module, whole, and after it what narrows it: the target's own training tasks whose reference exercises the capability,
and a reward of which half is that step's. The step, and how it is broken, stand in the registry of causes
(`captrain.capabilities`): an argument with another value, an operation left out, a look-up not made. So tools, world
and user are the target's by construction. A benchmark in workers has its world in packages that no file can hold: there
the file is what narrows alone, text of ours to the byte, which names the benchmark and is given its client when it is
opened (`loading`). Any other module that imports more than the standard library cannot be written into a file that runs
anywhere: there, as for capabilities that are not found in calls (wording, information, closing), a language model or a
synthesizer of one's own is needed. `derivable` says so before anything is spent.
"""

import ast
import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from itertools import combinations
from pathlib import Path

from captrain.benchmarks import absences
from captrain.capabilities import KINDS, Step, Toolbox, calls_in, says, text_of
from captrain.environments.loading import DERIVED, IMPORTS, IN_WORKERS, MARK, WORLD
from captrain.environments.passport import TRANSFER, failed_tool, foreign_imports
from captrain.environments.synthesizer import Attempt, Brief, NoTemplate
from captrain.errors import UserError
from captrain.records import plain
from captrain.run import Component, ModelAccess

DEFICITS = ("missing_lookup", "wrong_record", "missing_write", "wrong_argument")
"""Capabilities that the embedded base lacks."""
CONTROLS = ("extra_write", "reply_wording", "invalid_call")
"""Capabilities that a diagnosis may propose and reject: controls train them all the same."""
PAIRS = tuple("+".join(pair) for pair in combinations(sorted(DEFICITS), 2))
"""Two capabilities in every task."""
PARTS = {
    **{name: ("frame", name) for name in DEFICITS},
    **{name: ("frame", "named", name) for name in CONTROLS},
    **{name: ("frame", "pair", name) for name in PAIRS},
}
"""The templates that a file is made of, by capability."""
ANY_OPERATION = ("wrong_record", "missing_write")
"""Capabilities that every operation can ask for."""
OPERATIONS_OF = {
    "wrap_order": ("wrap",),
    "update_zip": ("zip",),
    **dict.fromkeys(("get_order", "cancel_order", "return_order", "deny_request"), ("cancel", "return")),
}
"""The operations that a step belongs to."""
EMBEDDED = "captrain.benchmarks.servicedesk.ServiceDesk"
EASIEST = 2
"""The ladder of difficulty runs from 0 to this."""
SEARCHED = 50
"""So many training tasks are looked through for one that exercises the capability, where there is no end to them."""
UNBOUNDED = 10_000
REMEDY = "set synthesizer=openai synthesizer.name=MODEL, or write a synthesizer of your own (docs/architecture.md)"


class TemplateSynthesizer:
    """Writes environments from templates.

    Args:
        access: unused; every synthesizer is built with how a language model is asked.
    """

    trusted = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            NoTemplate: there is none for this capability.
            UserError: the target is another than the embedded one, and no environment can be derived from it.
        """
        capability = brief.capability
        if brief.benchmark is not None and brief.benchmark.target != EMBEDDED:
            return derive(brief, brief.benchmark, attempts)
        if capability.id not in PARTS:
            raise NoTemplate(
                f"no template trains the capability {capability.id}",
                f"the templates know {', '.join(PARTS)}; tighten selection, or let a language model write it "
                "(synthesizer=openai, or --model)",
            )
        package = files("captrain")
        _, _, world = package.joinpath(WORLD).read_text().partition('\n"""\n')
        templates = package.joinpath("environments/templates")
        # Further operations are asked for where a passport found too little of the evidence's steps: those of these.
        failed = missing_tools(brief, attempts) if capability.id in ANY_OPERATION else []
        verbs_of_evidence = [verb for tool, verbs in OPERATIONS_OF.items() if tool in failed for verb in verbs]
        operations = [*dict.fromkeys(verbs_of_evidence)]
        names = [*PARTS[capability.id], *(["operations"] if operations else [])]
        parts = [templates.joinpath(f"{name}.py.txt").read_text() for name in names]
        title = _line(f"{capability.name}: {capability.description}")
        header = f'"""{title}\n\nWritten by the template synthesizer; do not edit.\n"""\n'
        # The attempt that brought the evidence's operations is not one that was too hard.
        settings = f"DIFFICULTY = {min(len(attempts) - bool(operations), EASIEST)}\n"
        settings += f"OPERATIONS = {operations}\n" if operations else ""
        return f"{header}{world}\n\n{settings}\n\n{''.join(parts)}"


def _line(text: str) -> str:
    """Return a text as one line that cannot end the docstring it stands in: an analyst may have proposed the words, and
    the file is run."""
    return " ".join(plain(text).replace("\\", "/").replace('"', "'").split())


def derivable(benchmark: Component) -> None:
    """Refuse a benchmark that no environment can be derived from.

    Raises:
        UserError: it has no reference solutions, a model plays its user, its module imports more than the standard
            library, or its class cannot be found there.
    """
    if "reference" in absences(benchmark):
        raise UserError(f"no environment can be derived from {benchmark.target}: it has no reference solutions", REMEDY)
    if benchmark.target in IN_WORKERS:
        if benchmark.settings().get("user") is not None:
            raise UserError(
                f"no environment can be derived from {benchmark.target} while a model plays its user: a solution may "
                "meet other words each time, and its passport demands the same",
                REMEDY,
            )
        return
    source, name = _source(benchmark)
    tree = ast.parse(source)
    foreign = foreign_imports(tree)
    if foreign:
        raise UserError(
            f"no environment can be derived from {benchmark.target}: its file imports {', '.join(foreign)}, and one "
            "that is trained in must run without",
            f"keep the benchmark's world in a file on the standard library alone, or {REMEDY}",
        )
    if not any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
        raise UserError(f"{benchmark.target} is not defined in the file that it is imported from", REMEDY)


def derive(brief: Brief, benchmark: Component, attempts: Sequence[Attempt]) -> str:
    """The text of an environment file.

    Args:
        brief: what is asked for; its capability is a cause of the registry.
        benchmark: the target.
        attempts: earlier ones: a base that found them too hard or too easy gets shorter or longer tasks, and where too
            few tasks held the steps that failed in the evidence, only those are left that hold one.

    Raises:
        NoTemplate: the cause is not found in calls.
        UserError: the benchmark stands on more than its file.
    """
    capability = brief.capability
    kind = KINDS.get(capability.id)
    if kind is None or kind.step is None:
        raise NoTemplate(
            f"no environment can be derived for {capability.id}: it is not found in calls of a reference", REMEDY
        )
    derivable(benchmark)
    body, target = "", repr(benchmark.target)
    if benchmark.target not in IN_WORKERS:
        source, target = _source(benchmark)
        # The module's text without its first words, which the file has its own of.
        first = ast.parse(source).body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            source = "\n".join(source.splitlines()[first.end_lineno :]) + "\n"
        body = source
    toolbox = Toolbox(brief.tools, capability.details.get("kinds"))
    step = _shown(kind.step, brief, toolbox)
    least, most = _lengths(brief, attempts)
    settings = {
        "name": capability.id,
        "KIND": step.kind,
        "SAID": step.by_user,
        "TOOLS": tuple(capability.details.get("tools", ())),
        "ARGUMENTS": tuple(capability.details.get("arguments", ())),
        "WRITES": tuple(name for name in toolbox.schemas if toolbox.kind(name) == "write"),
        "SETTINGS": benchmark.settings(),
        "EVIDENCE": tuple(missing_tools(brief, attempts)),
        "LEAST_CALLS": least,
        "MOST_CALLS": most,
        "SEARCHED": SEARCHED,
    }
    template = files("captrain").joinpath(DERIVED).read_text()
    header = f'"""{_line(capability.name)}: {_line(capability.description)}\n\nDerived from {benchmark.target}.\n"""\n'
    # In the class, so that no name of the target's module is taken; its own class may be called Environment, too.
    constants = "".join(f"    {key} = {value!r}\n" for key, value in settings.items()) + f"    TARGET = {target}\n"
    return f"{header}{body}{IMPORTS}{template.replace(MARK, constants)}"


def missing_tools(brief: Brief, attempts: Sequence[Attempt]) -> list[str]:
    """The tools at which the evidence failed, where the tasks of an attempt held too few of these steps; else none."""
    checks = [check for attempt in attempts for check in attempt.passport.checks]
    if all(check.passed for check in checks if check.name == TRANSFER):
        return []
    failed = [failed_tool(rollout) for rollout in brief.examples if rollout.outcome == "failed"]
    return [*dict.fromkeys(tool for tool in failed if tool)]


def _source(benchmark: Component) -> tuple[str, str]:
    """The text of a benchmark's file, and the name of its class."""
    module, _, name = benchmark.target.replace(":", ".").rpartition(".")
    try:
        loaded = import_module(module)
        return Path(inspect.getfile(getattr(loaded, name))).read_text(), name
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise UserError(f"_target_ = {benchmark.target} cannot be read ({error})", "name a class in a module") from None


def _shown(step: Step, brief: Brief, toolbox: Toolbox) -> Step:
    """Fit a step to the references of the examples: where most make a single change, that one may be left out as well
    as one of several; where most make none, a look-up comes before no change; and where most changes hold a value that
    the user says, such a value is broken, because a world may take any text for the others."""
    examples = [rollout for rollout in brief.examples if rollout.reference]
    changes = [[act for act in calls_in(rollout.reference, toolbox) if act.kind == "write"] for rollout in examples]
    counts = sorted(map(len, changes))
    median = counts[len(counts) // 2] if counts else 2
    if step.kind == "several" and median < 2:
        return step._replace(kind="write")
    if step.kind == "order" and median < 1:
        return step._replace(kind="look-up")
    if step.kind == "argument" and step.by_user is None:
        by_word = [
            any(says(text, value) for value in act.arguments.values())
            for rollout, acts in zip(examples, changes, strict=True)
            for text in [" ".join(text_of(m.get("content") or "") for m in rollout.messages if m["role"] == "user")]
            for act in acts
        ]
        return step._replace(by_user=True if by_word and 2 * sum(by_word) >= len(by_word) else None)
    return step


def _lengths(brief: Brief, attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Return the least and the most calls that references may have: any; after an attempt that was too hard for the
    base, at most about as many as half of the examples' references have; after one that was too easy, more."""
    counts = sorted(sum(len(m.get("tool_calls") or []) for m in rollout.reference) for rollout in brief.examples)
    if not attempts or not counts:
        return 1, UNBOUNDED
    median = max(1, counts[len(counts) // 2])
    hard = [
        check
        for check in attempts[-1].passport.checks
        if not check.passed and check.name.endswith("of the base") and check.measured is not None
    ]
    if any((check.measured or 0.0) < 0.5 for check in hard):
        return 1, max(1, median - (len(attempts) - 1))
    return (median + len(attempts), UNBOUNDED) if hard else (1, UNBOUNDED)
