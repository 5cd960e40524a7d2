"""The synthesizer that asks a language model: one question in each round.

The model sees the schemas of the tools, the system prompt, and compacted discovery rollouts. It sees no task data and
nothing of other splits. We insert the schemas into its text, so that they equal the target's. The answer is parsed here
and runs only in the sandbox.
"""

import ast
import pprint
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from captrain.capabilities import compact, fenced, line_of, rendered
from captrain.environments.sandbox.forkserver import MODULES
from captrain.environments.synthesizer import Attempt, Brief, render
from captrain.ledger import guard_split
from captrain.models import Question, StructuredAnswers
from captrain.records import CheckResult
from captrain.run import Count, ModelAccess

REQUIRED = ("tasks", "open", "score", "reference", "broken")
HEADER = "# Written by a language model (synthesizer openai, {name}) and read by nobody; do not edit.\n"
DETAIL = 1000
"""Most characters of a finding's detail."""
SCHEMAS = "TOOLS"
"""Name of the schemas in a file."""


class WrittenFile(BaseModel):
    """A model's answer."""

    model_config = ConfigDict(extra="forbid")
    reasoning: Annotated[str, Field(description="The occasion, the step that shows it, what each step earns.")]
    code: Annotated[str, Field(description="The whole Python file, without a fence around it.")]


class OpenAISynthesizer:
    """Asks a language model for environments.

    Args:
        access: the endpoint and its budget; None uses only answers on disk.
        name: name of the model at the endpoint.
        temperature: sampling temperature.
        max_tokens: most tokens of an answer, which holds a whole file.
        characters: most characters of all example rollouts together, and again of the system prompt.
    """

    trusted = False

    def __init__(
        self,
        access: ModelAccess | None = None,
        *,
        name: Annotated[str, Field(min_length=1)],
        temperature: Annotated[float, Field(ge=0)],
        max_tokens: Count,
        characters: Count = 24000,
    ) -> None:
        self.name, self.characters = name, characters
        self._answers = StructuredAnswers(access, name=name, temperature=temperature, max_tokens=max_tokens)
        self.usage = self._answers.usage

    def synthesize(self, brief: Brief, attempts: Sequence[Attempt]) -> str:
        """See `Synthesizer.synthesize`.

        Raises:
            UserError: an example is not of the discovery split, the model's answers are no environment files, or the
                question cannot be asked.
        """
        guard_split([rollout.task for rollout in brief.examples], "diagnosis")
        modules = ", ".join(sorted(name for name in MODULES if not name.startswith("_")))
        question = Question(
            system=render("synthesis.md", capability=brief.capability.id, modules=modules),
            user=self._brief(brief) + (self._repair(attempts) if attempts else ""),
            schema=WrittenFile,
            draw=len(attempts),
            check=lambda answer: complaint(answer.code),
        )
        [answer] = self._answers.ask([question], f"environment for {brief.capability.id}")
        return HEADER.format(name=self.name) + with_schemas(answer.code, brief.tools)

    def _brief(self, brief: Brief) -> str:
        capability = brief.capability.model_dump(include={"id", "name", "description", "details"})
        prompts = [message for rollout in brief.examples for message in rollout.messages if message["role"] == "system"]
        share = self.characters // max(1, len(brief.examples))
        return render(
            "brief.md",
            capability=fenced("capability", line_of(capability)),
            tools=fenced("tools", "\n".join(line_of(tool["function"]) for tool in brief.tools)),
            prompt=fenced("prompt", compact(prompts[:1], self.characters)[0]["content"]) if prompts else "",
            conversations=[
                fenced(
                    "conversation",
                    rendered(compact([entry for entry in rollout.messages if entry["role"] != "system"], share)),
                    number=number,
                    outcome=rollout.outcome,
                )
                for number, rollout in enumerate(brief.examples, start=1)
            ],
        )

    def _repair(self, attempts: Sequence[Attempt]) -> str:
        """Ask for a repair of the attempt that passed most checks (the latest of equals), with the findings of all."""
        passed = [sum(check.passed for check in attempt.passport.checks) for attempt in attempts]
        nearest = max(range(len(attempts)), key=lambda index: (passed[index], index))
        code = attempts[nearest].text.removeprefix(HEADER.format(name=self.name))
        checks = attempts[nearest].passport.checks
        return render(
            "repair.md",
            count=len(attempts),
            nearest=nearest + 1,
            code=fenced("file", with_schemas(code, [])),
            failed=_findings(checks),
            passed=", ".join(check.name for check in checks if check.passed),
            others=[
                {"number": index + 1, "failed": _findings(attempt.passport.checks)}
                for index, attempt in enumerate(attempts)
                if index != nearest
            ],
        )


def _findings(checks: Sequence[CheckResult]) -> str:
    """List the failed checks; those with the same finding share a line."""
    names: dict[tuple[tuple[str, object], ...], list[str]] = {}
    for check in checks:
        if not check.passed:
            finding = check.model_dump(include={"measured", "bound", "detail", "task"})
            finding["detail"] = check.detail[:DETAIL]  # it may hold text of the environment, of any length
            names.setdefault(tuple(finding.items()), []).append(check.name)
    return fenced("findings", "\n".join(line_of({"checks": of, **dict(finding)}) for finding, of in names.items()))


def complaint(code: str) -> str | None:
    """Return why a text cannot be an environment file, judged by parsing it; None if it can be one."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The last two from thousands of brackets.
        return f"code is not Python: {type(error).__name__}: {error}"
    if "Environment" not in [node.name for node in body if isinstance(node, ast.ClassDef)]:
        return "code defines no class Environment"
    defined = {node.name for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.FunctionDef)}
    if missing := [name for name in REQUIRED if name not in defined]:
        return f"code defines no {', '.join(missing)}"
    if len(_schemas(body)) != 1:
        return f"code must hold the line `{SCHEMAS} = []` exactly once, unindented"
    return None


def _schemas(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that assign the schemas."""
    return [
        node
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == SCHEMAS
    ]


def with_schemas(code: str, tools: Sequence[object]) -> str:
    """Insert the schemas into a text without a `complaint`."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    [node] = _schemas(ast.parse(code).body)
    literal = pprint.pformat(tools, width=110, sort_dicts=False)
    lines[node.lineno - 1 : node.end_lineno] = [f"{SCHEMAS} = {literal}"]
    return "\n".join(lines).rstrip("\n") + "\n"
