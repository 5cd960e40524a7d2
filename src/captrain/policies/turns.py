"""A policy whose adapter may change from turn to turn.

Before every turn of the assistant a chooser names the arm that takes it. The turn is played by the engine on that
arm's weights, after a prefill of the dialogue so far: what another adapter has left in the KV cache is not what this
one would have. Plays that have the same arm to come are played together. The stream of random numbers goes on from turn
to turn, so that a chooser that always names the same arm gives the very rollouts of that arm.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from captrain.errors import UserError
from captrain.models import adapter_digest
from captrain.policies.engine import EngineRow, sample_rows
from captrain.policies.local import LocalPolicy
from captrain.policies.policy import Play, Policy
from captrain.records import Message, digest


class Chooser(Protocol):
    """Policy for the arm of the next turn: names it from the messages."""

    @property
    def digest(self) -> str:
        """Identity of its choices."""
        ...

    def choose(self, messages: Sequence[Message]) -> str:
        """Choose the arm that takes the next turn of this dialogue; a function of the messages alone."""
        ...


class TurnRow(EngineRow):
    """A dialogue that stops for the engine after every turn; `goes_on` says whether another turn follows."""

    goes_on = True

    def take(self, token: int, logprob: float, ends: Collection[int], max_tokens: int, max_length: int) -> None:
        """See `EngineRow.take`."""
        super().take(token, logprob, ends, max_tokens, max_length)
        if self.over or not self.turn:
            self.goes_on, self.over = not self.over, True


class TurnPolicy:
    """Policy that plays turn by turn; usable wherever a policy is, but with the chooser's arms alone.

    Args:
        policy: the model, and how it is sampled from.
        chooser: who names the arms.
        arms: what the chooser can name -> folder of the adapter, "" for the base.

    Raises:
        UserError: the policy has no engine in this process, or an adapter is missing.
    """

    def __init__(self, policy: Policy, chooser: Chooser, arms: Mapping[str, str]) -> None:
        if not isinstance(policy, LocalPolicy):
            raise UserError(
                f"adapters change from turn to turn in this process only, and policy is {type(policy).__name__}",
                "choose policy=local, or leave routing by turns out",
            )
        self.policy, self.chooser, self.arms = policy, chooser, dict(arms)
        adapters = {arm: folder and adapter_digest(Path(folder)) for arm, folder in self.arms.items()}
        self.digest = digest(policy.digest, chooser.digest, adapters)

    def play(self, plays: Sequence[Play]) -> Iterator[Play]:
        """See `Policy.play`."""
        for start in range(0, len(plays), self.policy.batch):
            yield from self._batch(plays[start : start + self.policy.batch])

    def _batch(self, plays: Sequence[Play]) -> Sequence[Play]:
        rows = [(play, row) for play in plays if play.start() and (row := self.policy.row(play, TurnRow)) is not None]
        while rows:
            groups: dict[str, list[TurnRow]] = {}
            for play, row in rows:
                row.over = False
                groups.setdefault(self.arms[self.chooser.choose(play.messages)], []).append(row)
            for folder in sorted(groups):
                sample_rows(
                    self.policy.decoder(folder),
                    groups[folder],
                    ends=self.policy.ends,
                    temperature=self.policy.temperature,
                    max_tokens=self.policy.max_tokens,
                    max_length=self.policy.max_length,
                    top_p=self.policy.top_p,
                    top_k=self.policy.top_k,
                )
            for play, row in rows:
                play.truncated = self.policy.truncation(row)
                play.token_ids, play.mask, play.logprobs = row.ids, row.mask, row.logprobs
                play.completion_tokens = sum(row.mask)
                play.prompt_tokens = len(row.mask) - play.completion_tokens
            rows = [(play, row) for play, row in rows if row.goes_on]
        return plays
