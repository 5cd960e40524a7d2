"""Results of tools before anything was written: records by their identifiers, over all rollouts of an environment.

Every task of a benchmark begins with the same records, and a rollout that never opened one may still be judged by what
another rollout was shown of it. So results of look-ups are kept until the first write of a rollout, each object under
each of its identifiers. Only what is asked for again is worth the memory: whoever needs no records builds no book.
"""

from collections.abc import Iterator, Mapping

from captrain.capabilities import Act
from captrain.records import JsonObject

IDENTIFIERS = ("_id", "_number", "id", "number")


class RecordBook:
    """Objects that look-ups returned, by the names and values of their identifiers."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], list[JsonObject]] = {}
        self._people: dict[tuple[str, str], list[JsonObject]] = {}

    def add(self, acts: list[Act]) -> None:
        """Keep what the look-ups of a rollout returned before its first write."""
        for act in acts:
            if act.kind == "write" and not act.failed:
                return
            if act.kind == "read" and not act.failed:
                # A record that does not say its own key is known by the one it was asked for by.
                result = {**act.arguments, **act.result} if isinstance(act.result, dict) else act.result
                for record in objects(result):
                    self._keep(record)

    def _keep(self, record: JsonObject) -> None:
        for name, value in record.items():
            if name.endswith(IDENTIFIERS) and isinstance(value, str | int):
                entries = self._records.setdefault((name, str(value)), [])
                if not any(record.keys() <= entry.keys() for entry in entries):
                    entries.append(record)
        if "first_name" in record and "last_name" in record:
            people = self._people.setdefault(_person(record), [])
            if record not in people:
                people.append(record)

    def record(self, name: str, value: object, *fields: str) -> JsonObject | None:
        """The record of this identifier that has these fields, as it was before any write; None if none was shown."""
        entries = self._records.get((name, str(value)), [])
        return next((entry for entry in entries if all(field in entry for field in fields)), None)

    def people(self, person: Mapping[str, object]) -> list[JsonObject]:
        """Return the records of persons of this name."""
        return self._people.get(_person(person), [])


def _person(record: Mapping[str, object]) -> tuple[str, str]:
    return str(record.get("first_name")).lower(), str(record.get("last_name")).lower()


def objects(value: object) -> Iterator[JsonObject]:
    """Every JSON object inside a value, the outermost first."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(item)
