"""Where a rollout differs from its reference, charged to one cause each: what was done wrongly, what was left undone.

A difference says nothing of a rollout whose reference is suspect. What the user asked for on its own is charged to the
simulated user, who has a script; a value that the user chose is no wrong argument.
"""

import re
from collections.abc import Iterator, Sequence

from captrain.capabilities import (
    BY_MILESTONES,
    SIMULATOR,
    Act,
    Pair,
    Vocabulary,
    differing,
    leaves,
    same,
    says,
    text_of,
)
from captrain.diagnosis.book import objects
from captrain.diagnosis.case import Case, is_named, plain
from captrain.diagnosis.cause import Cause, quoted
from captrain.diagnosis.clauses import violations
from captrain.diagnosis.omissions import denials, stems_of, waiver
from captrain.records import JsonObject

CHEAPEST = re.compile(r"\b(cheap(est|er)?|lowest|least expensive)\b")
DEAREST = re.compile(r"\b(most expensive|priciest|highest price)\b")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
"""A date in figures alone."""
ALL = re.compile(r"\b(all|every\w*|entire|whole|rest)\b")
"""Words with which a user means more than it lists."""


def wrong_writes(case: Case) -> Iterator[Cause]:
    """A write that stands for one of the reference, but by another tool, on another record, or with other values."""
    forbidden = [violation.act for violation in violations(case.story.writes, case.wishes, case.setting)]
    for pair in case.story.pairs:
        act, goal = pair.write, pair.goal
        # What a clause forbids is charged to the breach of it.
        if act is None or act in forbidden:
            continue
        wrong, is_unread = differing(goal, act), act in case.unread()
        is_elsewhere = not same(act.record, goal.record)
        if case.is_apart(pair):
            continue
        if is_elsewhere and any(same(goal.arguments, attempt.arguments) for attempt in case.attempts(goal)):
            # What the tools refuse of the reference itself has nothing that stands for it.
            evidence = f"{act}, which the reference does not make"
            yield Cause("extra_write", act.message, evidence, "high", False, (act.tool,), tuple(act.arguments))
        elif is_elsewhere:
            evidence = f"{act}, where {goal} was meant"
            yield Cause("wrong_record", act.message, evidence, "high", False, (goal.tool,), tuple(goal.record))
        elif act.tool != goal.tool and not is_unread and not case.is_due(pair):
            preference = _preference(case, act, goal) or waiver(case, goal)
            if preference is not None:
                yield preference
                continue
            denial = next((place for place in denials(case, goal) if place < act.message), None)
            if denial is not None:
                evidence = f"{goal} was refused, and {act} made: {quoted(case.text(denial))}"
                yield Cause("partial_refusal", denial, evidence, "high", False, (goal.tool,))
            evidence = f"{act}, where {goal} was the right operation"
            yield Cause("wrong_operation", act.message, evidence, "high", False, (goal.tool,))
        elif wrong and act.tool == goal.tool:
            yield from _wrong_values(case, pair, act, [name for name in wrong if name in goal.content])


def _preference(case: Case, act: Act, goal: Act) -> Cause | None:
    """The message in which the user, who has a script, first asked for what was made, and in none before it was made
    for what is due."""
    users = case.users(act.message)
    due, actual = (re.compile(stems_of(tool)) for tool in (goal.tool, act.tool))
    if not case.script or any(due.search(plain(case.text(place))) for place in users):
        return None
    request = next((place for place in users if actual.search(plain(case.text(place)))), None)
    if request is None:
        return None
    evidence = f"the user asked for {act}, and not for {goal}: {quoted(case.text(request))}"
    return Cause(SIMULATOR, request, evidence, "medium", False)


def _wrong_values(case: Case, pair: Pair, act: Act, names: Sequence[str]) -> Iterator[Cause]:
    for name in names:
        expected, actual = pair.goal.content[name], act.content.get(name)
        if isinstance(expected, list) and isinstance(actual, list) and len(actual) != len(expected):
            least, most = sorted((actual, expected), key=len)
            if all(any(same(item, peer) or same(peer, item) for peer in most) for item in least):
                difference = [item for item in most if not any(same(item, peer) for peer in least)]
                yield _partial_list(case, act, name, difference, least is actual)
                return
    values = "; ".join(
        f"{name} {text_of(act.content.get(name))} should be {text_of(pair.goal.content[name])}" for name in names
    )
    extreme = next((word for name in names if (word := _overlooked(case, pair.goal, act, name))), None)
    if extreme is not None:
        evidence = f"{act.tool}: {values}: not the {extreme}"
        yield Cause("wrong_computation", case.proposal(act), evidence, "high", False, (act.tool,), tuple(names))
        return
    believed = next((name for name in names if _believed(case, pair.goal, act, name)), None)
    if believed is not None:
        evidence = f"{act.tool}: {values}; {believed} as the user said, where a record says otherwise"
        yield Cause("unverified_claim", case.proposal(act), evidence, "high", False, (act.tool,), (believed,))
        return
    choice = next((place for name in names if (place := _chosen(case, pair.goal, act, name)) is not None), None)
    if choice is not None:
        evidence = f"the user chose what the reference does not do: {quoted(case.text(choice))}"
        yield Cause(SIMULATOR, choice, evidence, "medium", False)
        return
    bargain = next((place for name in names if (place := _bargain(case, pair.goal, act, name)) is not None), None)
    if bargain is not None:
        evidence = (
            f"the user asks for the cheapest, and what the reference takes costs more: {quoted(case.text(bargain))}"
        )
        yield Cause(SIMULATOR, bargain, evidence, "medium", False)
        return
    if names:
        source = [name for name in names if not says(case.story.user, pair.goal.content[name])]
        unsaid = f" ({', '.join(source)}: in no words of the user)" if source else " (as the user said)"
        yield Cause(
            "wrong_argument", act.message, f"{act.tool}: {values}{unsaid}", "high", False, (act.tool,), tuple(names)
        )


def _partial_list(case: Case, act: Act, name: str, items: list[object], is_lacking: bool) -> Cause:
    """A list that lacks or holds items, charged to what made it so: a refusal of what the user had named, or a user who
    lists other things than its script."""
    words = ", ".join(text_of(item) for item in items)
    refusal = next((place for item in items if (place := _refused(case, act, item)) is not None), None)
    if is_lacking and refusal is not None:
        evidence = f"{words} was refused: {quoted(case.text(refusal))}"
        return Cause("partial_refusal", refusal, evidence, "high", False, (act.tool,), (name,))
    listing = _listing(case, act, act.content[name])
    unnamed = not any(says(case.story.user, label) for item in items for label in _labels(case, item)[:1])
    if is_lacking and listing is not None and unnamed and case.script:
        evidence = f"the user lists what it wants, without {words}: {quoted(case.text(listing))}"
        return Cause(SIMULATOR, listing, evidence, "medium", False)
    evidence = f"{act}: {name} {'lacks' if is_lacking else 'holds'} {words}"
    kind = "missing_write" if is_lacking else "extra_write"
    return Cause(kind, act.message, evidence, "high", False, (act.tool,), (name,))


def _labels(case: Case, item: object) -> list[str]:
    """What people call an item of a list: the name of its record, or its entries of letters."""
    if isinstance(item, dict):
        return [leaf for leaf in leaves(item) if leaf.isalpha() and len(leaf) > 2]
    return [str(record["name"]) for record in case.shown(text_of(item)) if isinstance(record.get("name"), str)][:1]


def _refused(case: Case, act: Act, item: object) -> int | None:
    """The reply that refuses an item right after the user has named it."""
    labels = _labels(case, item)
    for place in case.users(act.message):
        reply = next((reply for reply in case.replies(act.message) if reply > place), None)
        is_named = bool(labels) and all(says(case.text(place), label) for label in labels)
        if is_named and reply is not None and reply in case.refusals():
            return reply
    return None


def _listing(case: Case, act: Act, items: object) -> int | None:
    """The user's last message before a write that names each of its items, and does not mean all."""
    labels = [_labels(case, item) for item in items] if isinstance(items, list) else []
    for place in reversed(case.users(act.message)):
        words = plain(case.text(place))
        if labels and all(group and is_named(group[0], words) for group in labels):
            return None if ALL.search(words) else place
    return None


def _chosen(case: Case, goal: Act, act: Act, name: str) -> int | None:
    """The message in which the user named what was done, where the reference does something that the user never named:
    by value, or for an identifier by the options of its record. A request that nobody was asked about is no choice."""
    expected, actual = {*leaves(goal.content[name])}, {*leaves(act.content.get(name))}
    extra, absent = _options(case, actual - expected), _options(case, expected - actual)
    distinct = {value for value in extra - absent if not value.replace(".", "").isdigit()}
    if not distinct or not case.is_answered or any(says(case.story.user, value) for value in absent - extra):
        return None
    users = [place for place in case.users(act.message) if all(says(case.text(place), value) for value in distinct)]
    return users[0] if users else _named_choice(case, act, actual - expected, expected - actual)


def _named_choice(case: Case, act: Act, extra: set[str], absent: set[str]) -> int | None:
    """The message in which the user named what was taken by an entry of its record, such as the last figures of a card,
    and never by any that what the reference takes has."""
    entries = [{plain(entry.replace("_", " ")) for entry in leaves(case.book.named(value))} for value in sorted(extra)]
    rivals = {plain(entry.replace("_", " ")) for value in absent for entry in leaves(case.book.named(value))}
    if not extra or not all(entries) or any(says(case.wishes, rival) for rival in rivals):
        return None
    distinct = [{entry for entry in group - rivals if len(entry) > 3} for group in entries]
    for place in case.users(act.message):
        if all(any(says(case.text(place), entry) for entry in group) for group in distinct):
            return place
    return None


def _options(case: Case, values: set[str]) -> set[str]:
    """What describes the values: the options of records of which they are identifiers, else they themselves."""
    options: set[str] = set()
    for value in values:
        record = case.book.record("item_id", value, "options")
        options |= {*leaves(record["options"])} if record else {value}
    return options


def _believed(case: Case, goal: Act, act: Act, name: str) -> bool:
    """Whether a value is one that the user said without its script, where a record that was read has the right one, or
    records of the very person."""
    if any(_is_misnamed(case, goal, person) for person in objects(act.content.get(name))):
        return True
    words = str(act.content.get(name)).replace("_", " ")
    records = [record for call in case.story.acts if call.message < act.message for record in objects(call.result)]
    # To change a value of the very record is no claim about it. What a record begins with is its own name.
    elsewhere = [record for record in records if act.arguments.get(key := next(iter(record), "")) != record.get(key)]
    in_record = any(name in record and same(goal.content[name], record[name]) for record in elsewhere)
    return in_record and says(case.story.user, words) and bool(case.script) and not says(case.script, words)


def _is_misnamed(case: Case, goal: Act, person: JsonObject) -> bool:
    """Whether the user said of a person what its script does not, where the reference has what the records say."""
    names = ("first_name", "last_name")
    peers = [
        peer for peer in objects(goal.content) if all(name in peer and peer[name] == person.get(name) for name in names)
    ]
    for peer in peers:
        fields = [field for field in peer if field in person and not same(peer[field], person[field])]
        records = case.book.people(peer)
        if case.script and any(
            _is_spoken(case, text_of(person[field]))
            and not says(case.script, person[field])
            and any(record.get(field) == peer[field] for record in records)
            for field in fields
        ):
            return True
    return False


def _is_spoken(case: Case, value: str) -> bool:
    """Whether the user said a value; of a date, its year and its day, whatever the month is called."""
    year, _, day = value.partition("-") if DATE.fullmatch(value) else ("", "", "")
    words = [case.text(place) for place in case.users()]
    return says(case.story.user, value) or any(year and says(text, [year, str(int(day[-2:]))]) for text in words)


def _overlooked(case: Case, goal: Act, act: Act, name: str) -> str | None:
    """The superlative that the user asked for, where the prices shown say that the choice misses it."""
    choice, right = act.content.get(name), goal.content[name]
    prices = [_price(case, act, value) for value in (right, choice)]
    if prices[0] is None or prices[1] is None:
        return None
    if CHEAPEST.search(case.wishes) and prices[0] < prices[1]:
        return "cheapest"
    return "most expensive" if DEAREST.search(case.wishes) and prices[0] > prices[1] else None


def _bargain(case: Case, goal: Act, act: Act, name: str) -> int | None:
    """The message in which the user, who has a script, asked for the cheapest, where what was taken costs less than
    what the reference takes, and nothing that tells the two apart was ever said."""
    choice, right = act.content.get(name), goal.content[name]
    prices = [_price(case, act, value) for value in (right, choice)]
    if prices[0] is None or prices[1] is None or prices[1] >= prices[0] or not case.script:
        return None
    expected, actual = {*leaves(right)}, {*leaves(choice)}
    distinct = _options(case, expected - actual) - _options(case, actual - expected)
    if any(says(case.story.user, option) for option in distinct):
        return None
    return next((place for place in case.users(act.message) if CHEAPEST.search(plain(case.text(place)))), None)


def _price(case: Case, act: Act, values: object) -> float | None:
    """What a list of things costs together, going by what tools showed; None where that is not known of each."""
    total = 0.0
    for value in values if isinstance(values, list) else [values]:
        price = next((price for record in case.shown(value) if (price := _price_of(record, act)) is not None), None)
        if price is None:
            return None
        total += price
    return total


def _price_of(record: JsonObject, act: Act) -> float | None:
    prices = record.get("prices")
    options = (
        [prices.get(value) for value in act.arguments.values() if isinstance(value, str)]
        if isinstance(prices, dict)
        else []
    )
    price = next((option for option in options if option is not None), record.get("price"))
    return float(price) if isinstance(price, int | float) else None


def milestones(case: Case) -> Iterator[Cause]:
    """The first milestone of a benchmark that was not met: a call, its arguments, a state, or words to the user; and
    acts that were to be left out."""
    for kind, finders in BY_MILESTONES.items():
        findings = [finding for find in finders for finding in find(case.story, Vocabulary(())) if finding.lacking]
        for finding in findings[:1]:
            tools, arguments = finding.tools, finding.arguments
            yield Cause(kind, finding.message, finding.evidence, "high", False, tools, arguments)
