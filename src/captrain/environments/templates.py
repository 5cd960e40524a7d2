"""The template synthesizer: environments that a program writes, without a model.

The embedded benchmark has one template for each capability and for each pair. A written file contains the complete
source of the service desk, followed by the template's tasks and reward. So tools, policy and result shapes equal the
target's, and the rules of the other capabilities stay binding. Further attempts change the difficulty, if the rewards
of the base were out of bounds. Pairs are not played on the base and have one difficulty.

Some capabilities can be trained with any operation, and their templates use one. If the evidence failed at steps of
other operations, so that the passport found too few of these steps, further attempts use those operations, too.

Environments of other benchmarks are derived from the benchmark itself:

- If its module imports only the standard library, the file contains the complete module. After it come the training
  tasks whose reference uses the capability, and a reward of which half is for that step.
- A benchmark of ours in workers has its world in packages. The file contains only the narrowing part and receives the
  benchmark when it is loaded (`loading`).
- `derivable` refuses all others, before anything is spent. They need a language model or a synthesizer of their own,
  as do capabilities that are not found in calls (wording, information, closing).

The registry of causes (`captrain.capabilities`) defines the step and how it is broken: another argument value, a
missing operation, or a missing look-up.
"""

import ast
import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from itertools import combinations
from pathlib import Path

from captrain.benchmarks import absences
from captrain.capabilities import CAUSES, CHANGES, GoalPattern, Toolbox, calls_in, says, text_of
from captrain.environments.checks import TRANSFER, failed_tool, foreign_imports
from captrain.environments.loading import DERIVED, IMPORTS, IN_WORKERS, MARK, WORLD
from captrain.environments.synthesizer import Attempt, Brief, NoTemplate
from captrain.errors import UserError
from captrain.records import plain
from captrain.run import Component, ModelAccess

CHANGING = (*CHANGES, "environment")
"""Kinds of tools that a derived environment judges as changes: a shell's commands may change files."""
DEFICITS = ("missing_lookup", "wrong_record", "missing_write", "wrong_argument")
"""Capabilities that the embedded base lacks."""
CONTROLS = ("extra_write", "reply_wording", "invalid_call")
"""Capabilities that a diagnosis may propose and reject; controls train them nevertheless."""
PAIRS = tuple("+".join(pair) for pair in combinations(sorted(DEFICITS), 2))
"""Pairs of capabilities."""
PARTS = {
    **{name: ("frame", name) for name in DEFICITS},
    **{name: ("frame", "named", name) for name in CONTROLS},
    **{name: ("frame", "pair", name) for name in PAIRS},
}
"""Templates of a file, by capability."""
ANY_OPERATION = ("wrong_record", "missing_write")
"""Capabilities that can be trained with any operation."""
OPERATIONS_OF = {
    "wrap_order": ("wrap",),
    "update_zip": ("zip",),
    **dict.fromkeys(("get_order", "cancel_order", "return_order", "deny_request"), ("cancel", "return")),
}
"""Operations that contain a call."""
EMBEDDED = "captrain.benchmarks.servicedesk.ServiceDesk"
EASIEST = 2
"""Difficulties run from 0 to this."""
SEARCHED = 50
"""Training tasks that are searched for one that uses the capability, if their number has no limit."""
UNBOUNDED = 10_000
REMEDY = "set synthesizer=openai synthesizer.name=MODEL, or write a synthesizer of your own (docs/architecture.md)"


class TemplateSynthesizer:
    """Writes environments from templates.

    Args:
        access: unused; every synthesizer is built with it.
    """

    trusted = True

    def __init__(self, access: ModelAccess | None = None) -> None:
        pass

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            NoTemplate: there is none for this capability.
            UserError: no environment can be derived from the target.
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
        _, _, world = package.joinpath(WORLD).read_text(encoding="utf-8").partition('\n"""\n')
        templates = package.joinpath("environments/templates")
        # If a passport found too few of the failed steps, use their operations, too.
        failed = missing_tools(brief, attempts) if capability.id in ANY_OPERATION else []
        verbs_of_evidence = [verb for tool, verbs in OPERATIONS_OF.items() if tool in failed for verb in verbs]
        operations = [*dict.fromkeys(verbs_of_evidence)]
        names = [*PARTS[capability.id], *(["operations"] if operations else [])]
        parts = [templates.joinpath(f"{name}.py.txt").read_text(encoding="utf-8") for name in names]
        title = _line(f"{capability.name}: {capability.description}")
        header = f'"""{title}\n\nWritten by the template synthesizer; do not edit.\n"""\n'
        # The attempt that added operations was not too hard.
        settings = f"DIFFICULTY = {min(len(attempts) - bool(operations), EASIEST)}\n"
        settings += f"OPERATIONS = {operations}\n" if operations else ""
        return f"{header}{world}\n\n{settings}\n\n{''.join(parts)}"


def _line(text: str) -> str:
    """Return a text as one line that cannot end the docstring that contains it: a model may have written it."""
    return " ".join(plain(text).replace("\\", "/").replace('"', "'").split())


def derivable(benchmark: Component) -> None:
    """Refuse a benchmark that no environment can be derived from.

    Raises:
        UserError: it has no reference solutions, a model plays its user, its module imports more than the standard
            library, or does not define its class.
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
    """Write an environment file that is derived from a benchmark.

    Args:
        brief: the request; its capability is a cause of the registry.
        benchmark: the target.
        attempts: earlier attempts. If they were too hard or too easy for the base, the tasks become shorter or longer.
            If too few tasks had the failed steps, only tasks with such a step remain.

    Raises:
        NoTemplate: the cause is not found in calls.
        UserError: the benchmark needs more than its file.
    """
    capability = brief.capability
    kind = CAUSES.get(capability.id)
    if kind is None or kind.step is None:
        raise NoTemplate(
            f"no environment can be derived for {capability.id}: it is not found in calls of a reference", REMEDY
        )
    derivable(benchmark)
    body, target = "", repr(benchmark.target)
    if benchmark.target not in IN_WORKERS:
        source, target = _source(benchmark)
        # The module without its docstring: the file has its own.
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
        "WRITES": tuple(name for name in toolbox.schemas if toolbox.kind(name) in CHANGING),
        "SETTINGS": benchmark.settings(),
        "EVIDENCE": tuple(missing_tools(brief, attempts)),
        "LEAST_CALLS": least,
        "MOST_CALLS": most,
        "SEARCHED": SEARCHED,
    }
    template = files("captrain").joinpath(DERIVED).read_text(encoding="utf-8")
    header = f'"""{_line(capability.name)}: {_line(capability.description)}\n\nDerived from {benchmark.target}.\n"""\n'
    # Constants are in the class, so that they replace no name of the target's module.
    constants = "".join(f"    {key} = {value!r}\n" for key, value in settings.items()) + f"    TARGET = {target}\n"
    return f"{header}{body}{IMPORTS}{template.replace(MARK, constants)}"


def missing_tools(brief: Brief, attempts: Sequence[Attempt]) -> list[str]:
    """List the tools at which the evidence failed, if an attempt had too few of these steps."""
    checks = [check for attempt in attempts for check in attempt.passport.checks]
    if all(check.passed for check in checks if check.name == TRANSFER):
        return []
    failed = [failed_tool(rollout) for rollout in brief.examples if rollout.outcome == "failed"]
    return [*dict.fromkeys(tool for tool in failed if tool)]


def _source(benchmark: Component) -> tuple[str, str]:
    """Return the text of a benchmark's file, and the name of its class."""
    module, _, name = benchmark.target.replace(":", ".").rpartition(".")
    try:
        loaded = import_module(module)
        return Path(inspect.getfile(getattr(loaded, name))).read_text(encoding="utf-8"), name
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise UserError(f"_target_ = {benchmark.target} cannot be read ({error})", "name a class in a module") from None


def _shown(step: GoalPattern, brief: Brief, toolbox: Toolbox) -> GoalPattern:
    """Adapt a step to the references of the examples.

    - If most references make a single change, breaking the step may leave out that one.
    - If most make none, the look-up comes before no change.
    - If most changes have a value that the user says, such a value is broken: a world may accept any text for others.
    """
    examples = [rollout for rollout in brief.examples if rollout.reference]
    changes = [[act for act in calls_in(rollout.reference, toolbox) if act.kind in CHANGING] for rollout in examples]
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
    """Return the least and the most calls of a reference: fewer than the median after an attempt that was too hard for
    the base, more than the median after one that was too easy."""
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
