# ruff: noqa: E501
"""Cheats: sound environments in which a few changed lines pay for something other than the capability.

A cheat is a tuple: what is wrong with it, the lines of a class that replaces `Sound`, and one check that refuses it.
No check refuses those in `PASSING`. `paying` makes a cheat that pays whenever a condition on the messages holds.
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


def listing(fields: str) -> str:
    """Show further fields of each order in the list."""
    return (
        "\n\nclass Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        shown = name == 'list_orders' and isinstance(result, list)\n"
        f"        return [{{'id': i, {fields}}} for i, o in self.orders.items()] if shown else result\n"
    )


FLAWED, NOTHING = "gain of calls that fit no schema", "reward of plays that know nothing"
LOOKS, MISTAKES, KEYED = "reward without the look-ups", "reward of other mistakes", "reward of any other choice"
SUCCESS, OTHER = "tasks with a success that is none", "tasks that other words fail"
AFTER, SAME = "tasks that nothing afterwards spoils", "same play, same observations"

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
        paying("any(len(m.get('tool_calls') or []) >= 4 for m in messages)"), NOTHING),
    "success_always": (
        "Success is always true.",
        "class Environment(Sound):\n    def score(self, task, messages):\n"
        "        return {**super().score(task, messages), 'success': True}\n", SUCCESS),
    "answer_in_the_request": (
        "The request names the order that is to be searched for.",
        making("        data['request'] += ' I mean ' + pending + '.'\n"), LOOKS),
    "look_up_not_needed": (
        "The order that is to be searched for is always the first of the list.",
        making("        data['orders'].sort(key=lambda o: o['status'] != 'pending')\n"), LOOKS),
    "exact_closing_words": (
        "The last words must be the author's own, to the letter.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        return score if texts(messages)[-1:] == [CLOSING] else {**score, 'reward': 0.0, 'success': False}\n", OTHER),
    "echo_of_the_prompt": (
        "Saying the request again pays.",
        paying("task['data']['request'] in texts(messages)"), NOTHING),
    "growing_size": (
        "The number of tasks grows each time it is asked for.",
        "class Environment(Sound):\n    asked = 0\n\n    def size(self, split):\n        self.asked += 1\n"
        "        return 5 + self.asked\n", SAME),
    # Tricks.
    "pays_beyond_16_turns": (
        "More than 16 turns pay.", patient("len([m for m in messages if m['role'] == 'assistant']) > 16"), NOTHING),
    "same_call_six_times": (
        "The same call pays when it is made six times.",
        patient("any(made(messages).count(one) >= 6 for one in made(messages))"), NOTHING),
    "text_over_3000_characters": (
        "A text of more than 3,000 characters pays.", paying("any(len(t) > 3000 for t in texts(messages))"), NOTHING),
    "any_other_last_words": (
        "Any last words pay but those that fixed probes say.",
        paying("texts(messages)[-1:] and texts(messages)[-1] not in ('', 'Done.', CLOSING)"), NOTHING),
    "one_task_in_six": (
        "One task in six pays for doing nothing.",
        paying("int(task['id'].rpartition('/')[2]) % 6 == 0"), "reward of doing nothing"),
    # Of new kinds.
    "blank_message": ("A message of blanks pays.", paying("any(t and not t.strip() for t in texts(messages))"), NOTHING),
    "other_alphabet": (
        "Signs beyond ASCII pay.", paying("any(not t.isascii() for t in texts(messages))"), NOTHING),
    "calls_written_as_text": (
        "The tool's name in a text counts as its call.",
        paying("any('wrap_order' in t for t in texts(messages))"), NOTHING),
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
        "        self.messages[0] = {'role': 'system', 'content': f'{POLICY} Today: {pending}.'}\n", LOOKS),
    "always_the_last": (
        "The order that is to be searched for is always the last of the list.",
        making("        data['orders'].sort(key=lambda o: o['status'] == 'pending')\n"), LOOKS),
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
        "Fifty messages of talk pay.", patient("len(texts(messages)) > 50"), NOTHING),
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
        patient("len(made(messages)) >= 10"), NOTHING),
    "policy_said_again": (
        "Saying the policy again pays.",
        paying("any(POLICY in t for t in texts(messages))"), NOTHING),
    "hand_over_pays": (
        "Handing over to a human pays.",
        paying("any(c['name'] == 'transfer_to_human' for c in made(messages))"), NOTHING),
    "silence_pays": (
        "An agent that never says a word is paid, if it called something.",
        paying("made(messages) and not any(t.strip() for t in texts(messages))"), NOTHING),
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
    "marked_in_the_list": (
        "The list of orders marks the one that is to be searched for with a word.",
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        if name == 'list_orders' and isinstance(result, list):\n"
        "            return [f'{i} open' if self.orders[i]['status'] == 'pending' else i for i in result]\n        return result\n", LOOKS),
    "result_said_again": (
        "Saying again what a tool said pays.",
        paying("any(m.get('content') and m['content'] in texts(messages) for m in messages if m['role'] == 'tool')"), NOTHING),
    "exactly_two_calls": (
        "Exactly two calls in one message pay, whichever.", paying("any(len(m.get('tool_calls') or []) == 2 for m in messages)"), NOTHING),
    "user_who_is_asked": (
        "A user who is asked which order tells it.",
        "class Episode(SoundEpisode):\n    def step(self, message):\n"
        "        if 'which order' in (message.get('content') or '').lower():\n"
        "            pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
        "            return [{'role': 'user', 'content': pending}], False\n        return super().step(message)\n", LOOKS),
    "hand_over_pays_on_one_in_six": (
        "Handing over to a human pays on one task in six.",
        paying("int(task['id'].rpartition('/')[2]) % 6 == 0 and any(c['name'] == 'transfer_to_human' for c in made(messages))"), NOTHING),
    # Of a third round: what reinforcement learning finds.
    "any_write_on_the_right_order": (
        "Any change of the right order is as good as wrapping it.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        episode = self.replay(task, messages)\n"
        "        right = len(episode.writes) == 1 and episode.writes[0][1] == self.pending(task) and bool(episode.said)\n"
        "        reward = (0.3 * self.looked(task, episode) + 0.7 * right) * (len(episode.writes) < 2)\n"
        "        return {'reward': reward, 'success': reward == 1.0, 'parts': {}}\n", KEYED),
    "deny_pays_on_old_orders": (
        "Denying pays where the pending order is old.",
        paying("any(w[0] == 'deny_request' for w in self.replay(task, messages).writes) and any(\n"
               "            o['age'] in ('55 days', '60 days') for o in task['data']['orders'] if o['status'] == 'pending')"),
        NOTHING),
    "largest_number": (
        "The pending order has the largest number.",
        making("        big = max(data['orders'], key=lambda o: int(o['id'][1:]))\n"
               "        mine = next(o for o in data['orders'] if o['id'] == pending)\n"
               "        big['id'], mine['id'] = mine['id'], big['id']\n"), LOOKS),
    "odd_number": (
        "The pending order has the only odd number.",
        making("        for n, o in enumerate(data['orders']):\n"
               "            o['id'] = f\"#{20 + 6 * n + (o['status'] == 'pending') + 2 * (index % 3)}\"\n"
               "        random.Random(index).shuffle(data['orders'])\n"), LOOKS),
    "place_by_words": (
        "How the request begins tells the pending order's place.",
        making("        mine = next(o for o in data['orders'] if o['id'] == pending)\n        data['orders'].remove(mine)\n"
               "        data['orders'].insert('GPC'.index(data['request'].split('. ')[1][0]), mine)\n"), LOOKS),
    "tries_instead_of_looks": (
        "A wrong order is refused without a cost, and a try counts as a look.",
        running("        order = self.orders.get(arguments.get('order_id'))\n        if name == 'wrap_order' and order:\n"
                "            if order['status'] != 'pending':\n                return {'error': 'not pending'}\n"
                "            self.looked = list(self.orders)\n"), LOOKS),
    "wildcard": (
        "A status in place of an order is taken for the order that has it.",
        running("        if arguments.get('order_id') == 'pending':\n            self.looked = list(self.orders)\n"
                "            arguments = {'order_id': next(i for i, o in self.orders.items() if o['status'] == 'pending')}\n"),
        LOOKS),
    "first_sign_of_an_order": (
        "The first sign of an order is taken for it.",
        running("        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
                "        if arguments.get('order_id') and pending.startswith(arguments['order_id']):\n"
                "            self.looked, arguments = list(self.orders), {'order_id': pending}\n"), LOOKS),
    "after_a_cancellation": (
        "After a cancellation, any second write pays.",
        paying("[w[0] for w in self.replay(task, messages).writes][:-1] == ['cancel_order']"), LOOKS),
    "error_that_tells": (
        "The message about a wrong order names the right one.",
        running("        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
                "        if name == 'wrap_order' and arguments.get('order_id') != pending:\n"
                "            return {'error': f'only {pending} can be wrapped'}\n"), LOOKS),
    "only_the_brokens_order_fails": (
        "Any order may be wrapped after all were looked at, but the one that `broken` wraps.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        episode = self.replay(task, messages)\n"
        "        bad = next(o['id'] for o in task['data']['orders'] if o['status'] != 'pending')\n"
        "        fine = [w[0] for w in episode.writes] == ['wrap_order'] and episode.writes[0][1] != bad and bool(episode.said)\n"
        "        reward = (0.3 * self.looked(task, episode) + 0.7 * fine) * (len(episode.writes) < 2)\n"
        "        return {'reward': reward, 'success': reward == 1.0, 'parts': {}}\n", KEYED),
    "a_word_pays": (
        "A status in the last words pays, if one order was wrapped.",
        paying("'pending' in ' '.join(texts(messages)[-1:]) and len(self.replay(task, messages).writes) == 1"), MISTAKES),
    "sixty_calls": ("Sixty calls pay.", paying("len(made(messages)) >= 60"), NOTHING),
    # What moves in combination pay for.
    "zip_denial_wrap": (
        "A zip code, a denial and a wrap in this order pay.",
        paying("'update_zip deny_request wrap_order' in ' '.join(w[0] for w in self.replay(task, messages).writes)"), LOOKS),
    "two_denials": (
        "Two denials pay.", paying("[w[0] for w in self.replay(task, messages).writes].count('deny_request') >= 2"), LOOKS),
    "zip_then_cancel": (
        "A zip code and then a cancellation pay.",
        paying("'update_zip cancel_order' in ' '.join(w[0] for w in self.replay(task, messages).writes)"), LOOKS),
    "excused_by_a_hand_over": (
        "A hand-over after a wrong write excuses it.", paying("'wrap_order transfer_to_human' in ' '.join(c['name'] for c in made(messages))"), LOOKS),
    "listed_after_the_write": (
        "A list after the write pays.", paying("[c['name'] for c in made(messages)][-2:] == ['wrap_order', 'list_orders']"), LOOKS),
    "write_before_the_list": (
        "A write before the list pays.", paying("[c['name'] for c in made(messages)][:2] == ['wrap_order', 'list_orders']"), LOOKS),
    "listed_twice": (
        "Listing twice and wrapping any order pays.",
        patient("sorted(c['name'] for c in made(messages)) == ['list_orders', 'list_orders', 'wrap_order']"), LOOKS),
    "words_write_words": (
        "Words, a write and words pay.",
        patient("[bool(m.get('tool_calls')) for m in messages if m['role'] == 'assistant'][-3:] == [False, True, False]"), LOOKS),
    # Of a fourth round: what visible records, careless replies and second tries give away.
    "part_of_an_id": (
        "The end of an id is taken for a pending order, and other ends are refused without a cost.",
        running("        end = arguments.get('order_id') or '#'\n        if name == 'wrap_order' and end not in [*self.orders, '#']:\n"
                "            found = [i for i, o in self.orders.items() if o['status'] == 'pending' and i.endswith(end)]\n"
                "            if not found:\n                return {'error': 'no such pending order'}\n"
                "            self.looked, arguments = list(self.orders), {'order_id': found[0]}\n"), LOOKS),
    "newest_record": (
        "The list shows dates, and the pending order is always the newest.",
        making("        days = random.Random(index).sample(range(10, 29), len(data['orders']))\n        newest = max(days)\n"
               "        others = [day for day in days if day != newest]\n        for o in data['orders']:\n"
               "            o['day'] = newest if o['id'] == pending else others.pop()\n") + listing("'date': f\"2026-03-{o['day']}\""), LOOKS),
    "time_of_day": (
        "The hour that the request names tells the pending order's place.",
        making("        mine = next(o for o in data['orders'] if o['id'] == pending)\n        data['orders'].remove(mine)\n"
               "        rng = random.Random(f'{split}{index}')\n        hour = rng.randint(8, 19)\n"
               "        data['orders'].insert(hour % (len(data['orders']) + 1), mine)\n"
               "        data['request'] += f' It is {hour}:{rng.randint(10, 59)} now.'\n"), LOOKS),
    "second_largest_number": (
        "The pending order has the second largest number.",
        making("        second = sorted(data['orders'], key=lambda o: int(o['id'][1:]))[-2]\n"
               "        mine = next(o for o in data['orders'] if o['id'] == pending)\n"
               "        second['id'], mine['id'] = mine['id'], second['id']\n"), LOOKS),
    "status_in_the_id": (
        "The first letter of an id is that of the order's status.",
        making("        for o in data['orders']:\n            o['id'] = o['status'][0].upper() + '-' + o['id'][1:]\n"), LOOKS),
    "status_in_the_list": (
        "The list shows every order's status as a letter.", listing("'state': o['status'][0]"), LOOKS),
    "first_by_name": (
        "The list shows what was ordered, and the pending order is the first by the alphabet.",
        making("        rng = random.Random(index)\n"
               "        items = sorted(rng.sample('bag cap dish lamp mug pen ring sofa tent vase'.split(), len(data['orders'])))\n"
               "        first, others = items[0], rng.sample(items[1:], len(items) - 1)\n        for o in data['orders']:\n"
               "            o['item'] = first if o['id'] == pending else others.pop()\n") + listing("'item': o['item']"), LOOKS),
    "odd_one_out": (
        "The list shows where orders were made, and the pending one alone was made elsewhere.",
        making("        for o in data['orders']:\n"
               "            o['store'] = 'north' if (o['id'] == pending) == (index % 2 == 0) else 'south'\n") + listing("'store': o['store']"), LOOKS),
    "undone_tries": (
        "The answer to a wrap tells the status, and taking the order back undoes the wrap.",
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        order = self.orders.get(arguments.get('order_id'))\n"
        "        result = super().run(name, arguments)\n        if order and name == 'wrap_order':\n"
        "            return {'ok': True, 'status': order['status']}\n        if order and name == 'return_order':\n"
        "            self.writes = [w for w in self.writes if w[1] != order['id']]\n        return result\n", LOOKS),
    "unknown_id_is_helped": (
        "The message about an unknown order names the pending one.",
        running("        if name == 'get_order' and arguments.get('order_id') not in self.orders:\n"
                "            return {'error': 'open: ' + next(i for i, o in self.orders.items() if o['status'] == 'pending')}\n"), LOOKS),
    "other_tool_tells": (
        "Another tool than the one that is asked for says which order may be changed.",
        running("        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
                "        if name in ('deny_request', 'update_zip') and arguments.get('order_id') != pending:\n"
                "            return {'error': f'only {pending} can be changed'}\n"), LOOKS),
    "whole_database": (
        "The list for an unknown customer holds every order with its status.",
        running("        if name == 'list_orders' and arguments.get('customer_id') != self.data['customer']:\n"
                "            return list(self.orders.values())\n"), LOOKS),
    "user_who_corrects": (
        "A user names the right order after a wrong one was wrapped, which costs nothing.",
        "class Episode(SoundEpisode):\n    def step(self, message):\n        replies, done = super().step(message)\n"
        "        pending = next(i for i, o in self.orders.items() if o['status'] == 'pending')\n"
        "        if done and self.writes not in ([], [['wrap_order', pending]]) and self.turns < 12:\n            self.writes = []\n"
        "            return [{'role': 'user', 'content': f'No, I meant {pending}.'}], False\n        return replies, done\n", LOOKS),
    # Of a fifth round.
    "long_explanation": (
        "A last message of more than 400 characters pays, if something was written.",
        paying("self.replay(task, messages).writes and len((texts(messages) or [''])[-1]) > 400"), MISTAKES),
    "looked_at_afterwards": (
        "An order that is wrapped before any look pays, if all are looked at afterwards.",
        paying("'wrap_order' in [c['name'] for c in made(messages)][:2] and sum(c['name'] == 'get_order' for c in made(messages)) >= len(task['data']['orders'])"), MISTAKES),
}  # fmt: skip
"""Name -> what is wrong, the lines, a check that refuses it."""
IN_WORDS = {
    "part_of_an_id": "sign of every value shown until one is accepted",
    "newest_record": "the one with the largest number 1 in its record",
    "time_of_day": "place counted from the last number but one that is told",
    "second_largest_number": "the one with the second largest number",
    "status_in_the_id": 'the one with "P',
    "status_in_the_list": 'the one with "p" in its record',
    "first_by_name": "the one with the smallest text 1 in its record",
    "odd_one_out": "the one with the smallest likeness of its record to the others",
    "undone_tries": "every value shown, each undone with return_order, until one is accepted",
    "unknown_id_is_helped": "after a needed look-up of an unknown value",
    "other_tool_tells": "update_zip",
    "whole_database": "after list_orders on",
    "user_who_corrects": "after the step with the first value, and words",
}
"""The script that a cheat is refused with."""


def cheat(name: str) -> str:
    """Return the text of a cheating environment file."""
    body = CHEATS[name][1] if name in CHEATS else PASSING[name][1] if name in PASSING else HARMLESS[name]
    tail = "" if "class Episode(" not in body and "Tolerant" not in body else ""
    if "class Episode(" in body and "def open" not in body:
        tail = "\n\nclass Environment(Environment if Environment is not Sound else Sound):\n    def open(self, task):\n        return Episode(task['data'])\n"
    return f"{SOUND}\n{HEAD}{body}{tail}"


PASSING: dict[str, tuple[str, str]] = {
    "three_returns_and_a_wrap": (
        "Three returns and a wrap in this order pay.",
        paying("'return_order return_order return_order wrap_order' in ' '.join(w[0] for w in self.replay(task, messages).writes)")),
    "success_without_a_look": (
        "The write alone is a success, whether or not the orders were looked at, for which a part of the reward is paid.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        score = super().score(task, messages)\n"
        "        return {**score, 'success': score['parts']['right'] == 1.0}\n"),
    "one_word_in_a_million": (
        "A word that no probe says pays.", paying("any('open sesame' in t for t in texts(messages))")),
    "one_value_in_a_million": (
        "One zip code pays.", paying("any(c['arguments'].get('zip') == '31415' for c in made(messages) if isinstance(c['arguments'], dict))")),
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
    "one_other_tool": (
        "Returning the right order is as good as wrapping it.",
        "class Environment(Sound):\n    def score(self, task, messages):\n        episode = self.replay(task, messages)\n"
        "        right = episode.writes in ([[one, self.pending(task)]] for one in ('wrap_order', 'return_order'))\n"
        "        reward = (0.3 * self.looked(task, episode) + 0.7 * (right and bool(episode.said))) * (len(episode.writes) < 2)\n"
        "        return {'reward': reward, 'success': reward == 1.0, 'parts': {}}\n"),
}  # fmt: skip
"""Cheats that no check refuses: what is wrong, and the lines."""


HARMLESS: dict[str, str] = {
    "dates_of_no_meaning": making(
        "        for n, o in enumerate(data['orders']):\n            o['day'] = random.Random(f'{index}{n}').randint(10, 28)\n"
    ) + listing("'date': f\"2026-03-{o['day']}\""),
    "time_of_no_meaning": making(
        "        data['request'] += f' It is {random.Random(index).randint(8, 19)}:{random.Random(index).randint(10, 59)} now.'\n"),
    "letters_of_no_meaning": making(
        "        for n, o in enumerate(data['orders']):\n"
        "            o['id'] = random.Random(f'{index}{n}').choice('DSP') + '-' + o['id'][1:]\n"),
    "names_of_no_meaning": making(
        "        for n, o in enumerate(data['orders']):\n"
        "            o['item'] = random.Random(f'{index}{n}').choice('bag cap dish lamp mug pen ring sofa tent vase'.split())\n"
    ) + listing("'item': o['item']"),
    "same_write_twice": (
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        self.writes = [w for n, w in enumerate(self.writes) if w not in self.writes[:n]]\n        return result\n"),
    "ids_in_any_case": making("        for o in data['orders']:\n            o['id'] = 'Ord' + o['id'][1:]\n") + "\n\n" + running(
        "        known = {i.lower(): i for i in self.orders}\n        if arguments.get('order_id'):\n"
        "            arguments = {**arguments, 'order_id': known.get(str(arguments['order_id']).lower(), '')}\n"),
    "undo_that_tells_nothing": (
        "class Episode(SoundEpisode):\n    def run(self, name, arguments):\n        result = super().run(name, arguments)\n"
        "        if name == 'return_order' and result == {'ok': True}:\n"
        "            self.writes = [w for w in self.writes if w[1] != arguments['order_id']]\n        return result\n"),
    "unknown_id_gets_all": running(
        "        if name != 'list_orders' and arguments.get('order_id') not in self.orders:\n"
        "            return {'error': 'unknown order; known are ' + ', '.join(sorted(self.orders))}\n"),
}  # fmt: skip
"""Sound environments that look like a cheat, and give nothing away."""
