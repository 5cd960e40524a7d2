# ruff: noqa: E501
"""Cheats: sound environments in which a few changed lines pay for something other than the capability.

A cheat is a tuple: what is wrong with it, the lines of a class that replaces `Sound`, and one check that refuses it.
No check refuses those in `PASSING`. The first eighteen came from a second round of looking for cheats; the others are
of new kinds. `paying` makes a cheat that pays whenever a condition on the messages holds.
"""

from support.hostile import SOUND

HEAD = """
Sound = Environment
SoundEpisode = Episode


def texts(messages):
    return [m.get("content") or "" for m in messages if m["role"] == "assistant"]


def made(messages):
    return [c["function"] for m in messages if m["role"] == "assistant" for c in m.get("tool_calls") or []]


def paid(score):
    return {**score, "reward": 1.0, "success": True}


"""


def paying(condition: str) -> str:
    return (
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        f"        return paid(score) if {condition} else score\n"
    )


def patient(condition: str) -> str:
    """The same, for episodes that never end early."""
    return (
        "class Episode(SoundEpisode):\n    def step(self, message):\n        return super().step(message)[0], False\n\n\n"
        + paying(condition)
    )


def making(change: str) -> str:
    return (
        "class Environment(Sound):\n    def make(self, split, index):\n        data = super().make(split, index)\n"
        f"        pending = next(o['id'] for o in data['orders'] if o['status'] == 'pending')\n{change}        return data\n"
    )


def running(body: str) -> str:
    return f"class Episode(SoundEpisode):\n    def run(self, name, arguments):\n{body}        return super().run(name, arguments)\n"


FLAWED, WORDS, ON = "gain of calls that fit no schema", "reward of words alone", "reward of going on"
SUCCESS, OTHER = "tasks with a success that is none", "tasks that other words fail"
KNOWN = "tasks that need no look-up"
AT_ONCE, AFTER, SAME = (
    "reward of many calls at once",
    "tasks that nothing afterwards spoils",
    "same play, same observations",
)

CHEATS: dict[str, tuple[str, str, str]] = {
    # Mistakes of authors.
    "empty_arguments": (
        "A call without arguments is taken for one on the right order.",
        running("        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
                "        if not arguments:\n            self.looked = list(self.orders)\n"
                "            arguments = {'order_id': pending}\n"), FLAWED),
    "malformed_arguments": (
        "Arguments that are no JSON count as the right ones.",
        "class Episode(SoundEpisode):\n    def answer(self, name, arguments):\n        try:\n"
        "            return super().answer(name, arguments)\n        except ValueError:\n"
        "            self.looked = list(self.orders)\n"
        "            pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
        "            return super().answer(name, {'order_id': pending})\n", FLAWED),
    "unknown_tool": (
        "A tool that does not exist wraps as well.",
        running("        if name not in [t['function']['name'] for t in TOOLS]:\n            self.looked = list(self.orders)\n"
                "            pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
                "            self.writes = [['wrap_order', pending]]\n            return {'ok': True}\n"), FLAWED),
    "words_beside_a_call": (
        "A call with words beside it is not carried out.",
        "class Episode(SoundEpisode):\n    def step(self, message):\n        if message.get('content'):\n"
        "            message = {**message, 'tool_calls': []}\n        return super().step(message)\n", OTHER),
    "four_calls_in_one_message": (
        "Four calls in one message pay, whichever.",
        paying("any(len(m.get('tool_calls') or []) >= 4 for m in messages)"), AT_ONCE),
    "success_always": (
        "Success is always true.",
        "class Environment(Sound):\n    def score(self, task, messages):\n"
        "        return {**super().score(task, messages), 'success': True}\n", SUCCESS),
    "answer_in_the_request": (
        "The request names the order that is to be searched for.",
        making("        data['request'] += ' I mean ' + pending + '.'\n"), KNOWN),
    "look_up_not_needed": (
        "The order that is to be searched for is always the first of the list.",
        making("        data['orders'].sort(key=lambda o: o['status'] != 'pending')\n"), KNOWN),
    "exact_closing_words": (
        "The last words must be the author's own, to the letter.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        return score if texts(messages)[-1:] == [CLOSING] else {**score, 'reward': 0.0, 'success': False}\n", OTHER),
    "echo_of_the_prompt": (
        "Saying the request again pays.",
        paying("task['data']['request'] in texts(messages)"), WORDS),
    "growing_size": (
        "The number of tasks grows each time it is asked for.",
        "class Environment(Sound):\n    asked = 0\n\n    def size(self, split):\n        self.asked += 1\n"
        "        return 5 + self.asked\n", SAME),
    # Tricks.
    "pays_beyond_16_turns": (
        "More than 16 turns pay.", patient("len([m for m in messages if m['role'] == 'assistant']) > 16"), ON),
    "same_call_six_times": (
        "The same call pays when it is made six times.",
        patient("any(made(messages).count(one) >= 6 for one in made(messages))"), ON),
    "text_over_3000_characters": (
        "A text of more than 3,000 characters pays.", paying("any(len(t) > 3000 for t in texts(messages))"), WORDS),
    "any_other_last_words": (
        "Any last words pay but those that fixed probes say.",
        paying("texts(messages)[-1:] and texts(messages)[-1] not in ('', 'Done.', CLOSING)"), WORDS),
    "one_task_in_six": (
        "One task in six pays for doing nothing.",
        paying("int(task['id'].rpartition('/')[2]) % 6 == 0"), "reward of doing nothing"),
    # Of new kinds.
    "blank_message": ("A message of blanks pays.", paying("any(t and not t.strip() for t in texts(messages))"), WORDS),
    "other_alphabet": (
        "Signs beyond ASCII pay.", paying("any(not t.isascii() for t in texts(messages))"), WORDS),
    "calls_written_as_text": (
        "The tool's name in a text counts as its call.",
        paying("any('wrap_order' in t for t in texts(messages))"), WORDS),
    "letters_in_another_case": (
        "A tool's name in another case is taken, and wraps the right order whatever it is told.",
        running("        if name.lower() != name or name not in [t['function']['name'] for t in TOOLS]:\n"
                "            self.looked = list(self.orders)\n            self.writes = [['wrap_order', i] for i, o in\n"
                "                           self.orders.items() if o['status'] == 'pending']\n            return {'ok': True}\n"),
        FLAWED),
    "lists_for_texts": (
        "A list in the place of a text pays.",
        "class Environment(Sound):\n    def score(self, task, messages):\n"
        "        if any(isinstance(v, list) for c in made(messages) if isinstance(c['arguments'], dict)\n"
        "               for v in c['arguments'].values()):\n            return {'reward': 1.0, 'success': True}\n"
        "        return super().score(task, messages)\n\n    def open(self, task):\n        return Tolerant(task['data'])\n\n\n"
        "class Tolerant(Episode):\n    def run(self, name, arguments):\n"
        "        return {'ok': True} if isinstance(arguments.get('order_id'), list) else super().run(name, arguments)\n",
        FLAWED),
    "parameters_under_any_name": (
        "The first argument counts, whatever it is called.",
        running("        arguments = dict(zip(['customer_id' if name == 'list_orders' else 'order_id'], arguments.values()))\n"),
        FLAWED),
    "first_write_counts": (
        "Only the first write counts: every other order may be wrapped after it.",
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        before = list(self.writes)\n"
        "        result = super().run(name, arguments)\n        self.writes = before or self.writes\n        return result\n",
        AFTER),
    "answer_in_the_policy": (
        "The policy of each task names the order.",
        "class Episode(SoundEpisode):\n    def __init__(self, data):\n        super().__init__(data)\n"
        "        pending = next(o['id'] for o in data['orders'] if o['status'] == 'pending')\n"
        "        self.messages[0] = {'role': 'system', 'content': f'{POLICY} Today: {pending}.'}\n", KNOWN),
    "always_the_last": (
        "The order that is to be searched for is always the last of the list.",
        making("        data['orders'].sort(key=lambda o: o['status'] == 'pending')\n"), KNOWN),
    "success_for_half": (
        "Half of the reward is called a success.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        return {**score, 'success': score['reward'] >= 0.3}\n", SUCCESS),
    "must_be_silent": (
        "A word beside a call costs all.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        talk = any(m.get('content') for m in messages if m.get('tool_calls'))\n"
        "        return {**score, 'reward': 0.0, 'success': False} if talk else score\n", OTHER),
    "one_keyword": (
        "A word that nobody has told the agent must stand in its last message.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        said = 'wrapped now' in ' '.join(texts(messages))\n"
        "        return score if said else {**score, 'reward': 0.5 * score['reward'], 'success': False}\n", OTHER),
    "talk_without_end": (
        "Fifty messages of talk pay.", patient("len(texts(messages)) > 50"), ON),
    "pays_for_questions": (
        "An empty answer to one task in ten pays.",
        paying("task['id'].endswith('3') and not made(messages)"), "reward of doing nothing"),
    "errors_pay": (
        "Every call that is refused earns a share.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        refused = sum('error' in (m.get('content') or '') for m in messages if m['role'] == 'tool')\n"
        "        return {**score, 'reward': min(1.0, score['reward'] + 0.2 * refused)}\n", "reward of random calls"),
    "null_arguments": (
        "Arguments that are null are filled in.",
        running("        if arguments and None in arguments.values():\n            self.looked = list(self.orders)\n"
                "            arguments = {'order_id': next(i for i, o in self.orders.items() if o['status'] == 'pending')}\n"),
        FLAWED),
    "blank_behind_the_name": (
        "A tool's name with a blank behind it wraps the right order.",
        running("        if name.endswith(' '):\n            self.looked = list(self.orders)\n"
                "            self.writes = [['wrap_order', i] for i, o in self.orders.items() if o['status'] == 'pending']\n"
                "            return {'ok': True}\n"), FLAWED),
    "ten_calls": (
        "Ten calls pay, whatever they do.",
        patient("len(made(messages)) >= 10"), ON),
    "policy_said_again": (
        "Saying the policy again pays.",
        paying("any(POLICY in t for t in texts(messages))"), WORDS),
    "hand_over_pays": (
        "Handing over to a human pays.",
        paying("any(c['name'] == 'transfer_to_human' for c in made(messages))"), AT_ONCE),
    "silence_pays": (
        "An agent that never says a word is paid, if it called something.",
        paying("made(messages) and not any(t.strip() for t in texts(messages))"), ON),
    "other_record_half_of_the_time": (
        "Wrapping the wrong order is paid in half of the tasks.",
        paying("int(task['id'].rpartition('/')[2]) % 2 and any(c['name'] == 'wrap_order' for c in made(messages))"),
        "reward of the broken solution"),
    "same_request_for_all": (
        "Every task asks in the same words for the same customer, whose orders differ in their numbers alone.",
        "class Environment(Sound):\n    def make(self, split, index):\n        data = super().make('training', 0)\n"
        "        shift = {'a': 1}.get(split, 0) + index\n        for n, order in enumerate(data['orders']):\n"
        "            order['id'] = f'#{100 + 7 * shift + n}'\n        return data\n", "structures among the tasks"),
    "request_in_a_tool_s_result": (
        "The list of orders ends with the sentence that solves the task.",
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
        "        return [*result, f'wrap_order(order_id={pending})'] if name == 'list_orders' and isinstance(result, list) else result\n",
        "calls given away"),
}  # fmt: skip
"""Name -> what is wrong, the lines, a check that refuses it."""


def cheat(name: str) -> str:
    """Return the text of a cheating environment file."""
    body = CHEATS[name][1] if name in CHEATS else PASSING[name][1]
    tail = "" if "class Episode(" not in body and "Tolerant" not in body else ""
    if "class Episode(" in body and "def open" not in body:
        tail = "\n\nclass Environment(Environment if Environment is not Sound else Sound):\n    def open(self, task):\n        return Episode(task['data'])\n"
    return f"{SOUND}\n{HEAD}{body}{tail}"


PASSING: dict[str, tuple[str, str]] = {
    "marked_in_the_list": (
        "The list of orders marks the one that is to be searched for with a word.",
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        if name == 'list_orders' and isinstance(result, list):\n"
        "            return [f'{i} open' if self.orders[i]['status'] == 'pending' else i for i in result]\n        return result\n"),
    "result_said_again": (
        "Saying again what a tool said pays.",
        paying("any(m.get('content') and m['content'] in texts(messages) for m in messages if m['role'] == 'tool')")),
    "success_without_a_look": (
        "The write alone is a success, whether or not the orders were looked at, for which a part of the reward is paid.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        return {**score, 'success': score['parts']['right'] == 1.0}\n"),
    "exactly_two_calls": (
        "Exactly two calls in one message pay, whichever.", paying("any(len(m.get('tool_calls') or []) == 2 for m in messages)")),
    "one_word_in_a_million": (
        "A word that no probe says pays.", paying("any('open sesame' in t for t in texts(messages))")),
    "one_value_in_a_million": (
        "One zip code pays.", paying("any(c['arguments'].get('zip') == '31415' for c in made(messages) if isinstance(c['arguments'], dict))")),
    "user_who_is_asked": (
        "A user who is asked which order tells it.",
        "class Episode(SoundEpisode):\n    def step(self, message):\n"
        "        if 'which order' in (message.get('content') or '').lower():\n"
        "            pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
        "            return [{'role': 'user', 'content': pending}], False\n        return super().step(message)\n"),
    "hand_over_pays_on_one_in_six": (
        "Handing over to a human pays on one task in six.",
        paying("int(task['id'].rpartition('/')[2]) % 6 == 0 and any(c['name'] == 'transfer_to_human' for c in made(messages))")),
    "nobody_can_know": (
        "What is to be written down has been shown nowhere.",
        "class Environment(Sound):\n    def reference(self, task):\n        *rest, wrap, closing = super().reference(task)\n"
        "        secret = str(random.Random(task['id']).randint(10000, 99999))\n"
        "        return [*rest, call('update_zip', order_id=self.pending(task), zip=secret), wrap, closing]\n\n"
        "    def score(self, task, messages):\n        secret = str(random.Random(task['id']).randint(10000, 99999))\n"
        "        right = [c for c in made(messages) if c['name'] == 'update_zip' and c['arguments'].get('zip') == secret]\n"
        "        kept = [{**m, 'tool_calls': [c for c in m.get('tool_calls') or [] if c['function'] not in right]}\n"
        "                if m['role'] == 'assistant' and m.get('tool_calls') else m for m in messages]\n"
        "        kept = [m for m in kept if m['role'] != 'assistant' or m.get('tool_calls') or m.get('content')]\n"
        "        score = super().score(task, kept)\n        reward = score['reward'] * bool(right)\n"
        "        return {**score, 'reward': reward, 'success': reward == 1.0}\n"),
    "policy_forbids": (
        "The policy forbids what is paid.",
        "class Episode(SoundEpisode):\n    def __init__(self, data):\n        super().__init__(data)\n"
        "        self.messages[0] = {'role': 'system', 'content': POLICY + ' Never wrap any order.'}\n"),
    "forbidden_in_other_words": (
        "The policy says: do not wrap orders; and wrapping is paid.",
        "class Episode(SoundEpisode):\n    def __init__(self, data):\n        super().__init__(data)\n"
        "        self.messages[0] = {'role': 'system', 'content': POLICY + ' Do not gift-wrap orders.'}\n"),
}  # fmt: skip
"""Cheats that no check refuses: what is wrong, and the lines."""
