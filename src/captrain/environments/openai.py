"""The synthesizer that asks a language model: one question for each round, and after a failed passport the next.

The model sees what the target's author would show it: the schemas of the tools, the system prompt, and discovery
rollouts, compacted; no task's data, nothing of another split. The schemas are put into its text by us, so that they
equal the target's without being copied. What comes back is nobody's own text: it is parsed and never run here, and
whoever opens it does so in a sandbox.
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
from captrain.records import CheckResult, JsonObject
from captrain.run import Count, ModelAccess

REQUIRED = ("tasks", "open", "score", "reference", "broken")
HEADER = "# Written by a language model (synthesizer openai, {name}) and read by nobody; do not edit.\n"
DETAIL = 1000
"""Characters of a finding's detail that are shown."""
SCHEMAS = "TOOLS"
"""The name that the schemas have in a file."""


class WrittenFile(BaseModel):
    """A model's answer."""

    model_config = ConfigDict(extra="forbid")
    reasoning: Annotated[str, Field(description="The occasion, the step that shows it, what each step earns.")]
    code: Annotated[str, Field(description="The whole Python file, without a fence around it.")]


class OpenAISynthesizer:
    """Asks a language model for environments.

    Args:
        access: the endpoint and its budget; None where nothing may be sent, and answers come from disk alone.
        name: of the model, as the endpoint knows it.
        temperature: sampling temperature.
        max_tokens: tokens in one answer, which holds a whole file.
        characters: of all example rollouts together, as they are shown; so many again for the system prompt.
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
            UserError: an example is of another split than discovery, the model's answers are no environment files, or
                the question cannot be asked.
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
        """The attempt that passed most checks, the latest of equals, with its findings; of the others what failed."""
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
    """The failed checks, those with one finding together; a detail may hold what the environment itself said, at any
    length."""
    findings: dict[str, JsonObject] = {}
    for check in checks:
        if not check.passed:
            finding = check.model_dump(include={"measured", "bound", "detail", "task"})
            finding["detail"] = finding["detail"][:DETAIL]
            findings.setdefault(line_of(finding), {"checks": [], **finding})["checks"].append(check.name)
    return fenced("findings", "\n".join(map(line_of, findings.values())))


def complaint(code: str) -> str | None:
    """Return what keeps a text from being an environment file, as far as reading it tells; None when nothing does."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The latter two of some thousand brackets.
        return f"code is not Python: {type(error).__name__}: {error}"
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    if "Environment" not in [node.name for node in classes]:
        return "code defines no class Environment"
    # Its own and those of its bases, as far as the file defines them above it.
    methods, lineage = set[str](), {"Environment"}
    for node in reversed(classes):
        if node.name in lineage:
            methods |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            lineage = lineage - {node.name} | {base.id if isinstance(base, ast.Name) else "" for base in bases}
    # A base that is no class of the file may have them: loading tells.
    if (missing := [name for name in REQUIRED if name not in methods]) and not lineage:
        return f"class Environment has no {', '.join(missing)}"
    if len(_schemas(body)) != 1:
        return f"code must hold the line `{SCHEMAS} = []` exactly once, unindented"
    return None


def _schemas(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements that say what the schemas are."""
    return [
        node
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == SCHEMAS
    ]


def with_schemas(code: str, tools: list[JsonObject]) -> str:
    """The text of a file, of which `complaint` has nothing to say, with the schemas in their place."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    [node] = _schemas(ast.parse(code).body)
    literal = pprint.pformat(tools, width=110, sort_dicts=False)
    lines[node.lineno - 1 : node.end_lineno] = [f"{SCHEMAS} = {literal}"]
    return "\n".join(lines).rstrip("\n") + "\n"
