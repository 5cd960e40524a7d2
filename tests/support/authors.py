# ruff: noqa: E501
"""Environment files in the styles of three authors, with sound examples of each.

`COMPARED` compares the final state with the state after the reference, and binds arguments as Python does.
`SCRIPTED` has a user who gives the details turn by turn. `SEEDED` keeps only a task's number, answers in prose, and
pays for milestones. `ENVIRONMENTS` maps a name to its frame, tools, policy and the parts that differ.
"""


def tool(name: str, description: str, /, **parameters: str) -> dict[str, object]:
    """Build a tool's schema from the types of its parameters."""
    properties = {key: {"type": kind, "description": key} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


COMPARED = '''
import copy
import json
import random

TOOLS = {tools!r}
POLICY = {policy!r}


def use(name, /, **arguments):
    function = {{"name": name, "arguments": json.dumps(arguments)}}
    return {{"role": "assistant", "content": None, "tool_calls": [{{"id": "call", "type": "function", "function": function}}]}}


class World:
    """The tools are its methods; what they change is its state."""

    def __init__(self, state):
        self.state = copy.deepcopy(state)

    def close_case(self, *, reason):
        self.state["closed"] = True
        return "closed"

{parts}


class Episode:
    def __init__(self, data):
        self.world, self.words = World(data["state"]), []
        self.messages = [{{"role": "system", "content": POLICY}}, {{"role": "user", "content": data["request"]}}]

    def step(self, message):
        calls = message.get("tool_calls") or []
        if not calls:
            self.words.append(message.get("content") or "")
        return [self.answer(one["function"]) for one in calls], not calls

    def answer(self, function):
        before = copy.deepcopy(self.world.state)
        try:
            arguments = function["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if function["name"] not in [one["function"]["name"] for one in TOOLS]:
                raise ValueError("no such tool")
            result = getattr(self.world, function["name"])(**arguments)
        except (TypeError, ValueError, KeyError, AttributeError) as fault:
            self.world.state, result = before, {{"error": str(fault)}}
        return {{"role": "tool", "tool_call_id": "call", "name": function["name"], "content": json.dumps(result)}}


class Environment:
    name = {name!r}
    tools = TOOLS

    def tasks(self, split, count):
        tasks = []
        for number in range(count):
            request, state, goal = draw(random.Random(f"{{split}}-{{number}}-{{self.name}}"))
            data = {{"request": request, "state": state, "goal": goal}}
            tasks.append({{"id": f"{{split}}-{{number}}", "split": split, "data": data}})
        return tasks

    def open(self, task):
        return Episode(task["data"])

    def played(self, task, messages):
        episode = self.open(task)
        for message in messages:
            if message["role"] == "assistant":
                episode.step(message)
        return episode

    def score(self, task, messages):
        mine, wanted = self.played(task, messages), self.played(task, self.reference(task))
        same = mine.world.state == wanted.world.state and any(word.strip() for word in mine.words)
        return {{"reward": float(same), "success": same, "parts": {{"state": float(same)}}}}

    def reference(self, task):
        return plan(task["data"]["state"], task["data"]["goal"], False)

    def broken(self, task):
        return plan(task["data"]["state"], task["data"]["goal"], True)


def end(text):
    return {{"role": "assistant", "content": text}}


'''

SCRIPTED = '''
import json
import random

POLICY, TOOLS = {policy!r}, {tools!r}
SAY, DO = "say", "do"


def message_of(step):
    if step[0] != DO:
        return {{"role": "assistant", "content": step[1]}}
    function = {{"name": step[1], "arguments": step[2]}}
    return {{"role": "assistant", "content": "", "tool_calls": [{{"type": "function", "function": function}}]}}


class Call:
    """A customer on the line: says at first what is wanted, and answers to what is asked."""

    def __init__(self, facts):
        self.facts, self.log, self.asked, self.silence = facts, [], set(), 0
        self.messages = [{{"role": "system", "content": POLICY}}, {{"role": "user", "content": facts["opening"]}}]

    def customer(self, text):
        for word, answer in self.facts["answers"].items():
            if word in text.lower() and word not in self.asked:
                self.asked.add(word)
                return answer
        return None

    def step(self, message):
        out = []
        for one in message.get("tool_calls") or []:
            out.append({{"role": "tool", "name": one["function"]["name"], "content": self.desk(**one["function"])}})
        if out:
            return out, len(self.log) > 12
        answer = self.customer(message.get("content") or "")
        if answer is None:
            self.silence += 1
            return [], True
        return [{{"role": "user", "content": answer}}], False

    def desk(self, name, arguments):
        declared = {{t["function"]["name"]: t["function"]["parameters"]["properties"] for t in TOOLS}}
        if not isinstance(arguments, dict) or name not in declared or arguments.keys() != declared[name].keys():
            return "Not understood."
        if not all(isinstance(value, int) == (declared[name][key]["type"] == "integer") and not isinstance(value, (list, dict))
                   for key, value in arguments.items()):
            return "Not understood."
        if name == "close_case":
            self.log.append((name, ""))
            return "Closed."
        return handle(self.facts, self.log, name, arguments)


{parts}


class Environment:
    name, tools = {name!r}, TOOLS

    def tasks(self, split, count):
        for_each = [random.Random(f"{{self.name}}:{{split}}:{{n}}") for n in range(count)]
        return [{{"id": f"{{self.name}}-{{split}}-{{n}}", "split": split, "data": facts_of(rng)}} for n, rng in enumerate(for_each)]

    def open(self, task):
        return Call(task["data"])

    def score(self, task, messages):
        call = Call(task["data"])
        for message in messages:
            if message["role"] == "assistant":
                call.step(message)
        asked = call.asked >= set(task["data"]["answers"])
        right = [tuple(entry) for entry in call.log] == [tuple(entry) for entry in log_of(task["data"])]
        solved = asked and right
        return {{"reward": float(solved), "success": solved, "parts": {{"asked": float(asked), "right": float(right)}}}}

    def reference(self, task):
        return [message_of(step) for step in steps_of(task["data"], 0)]

    def broken(self, task):
        return [message_of(step) for step in steps_of(task["data"], 1)]
'''

SEEDED = """
from random import Random

TOOLS = {tools!r}
GUIDE = {policy!r}


def act(name, /, **arguments):
    return dict(role="assistant", content="", tool_calls=[dict(type="function", function=dict(name=name, arguments=arguments))])


def fits(name, arguments):
    for one in TOOLS:
        function = one["function"]
        if function["name"] == name and isinstance(arguments, dict) and set(arguments) == set(function["parameters"]["required"]):
            kinds = dict(string=str, integer=int)
            return all(type(arguments[k]) is kinds[v["type"]] for k, v in function["parameters"]["properties"].items())
    return False


{parts}


class Run:
    def __init__(self, number):
        self.case = case_of(Random(number))
        self.done, self.report = [], None
        self.messages = [dict(role="system", content=GUIDE), dict(role="user", content=self.case["request"])]

    def step(self, message):
        if not message.get("tool_calls"):
            self.report = message.get("content") or ""
            return [], True
        answers = []
        for one in message["tool_calls"]:
            name, arguments = one["function"]["name"], one["function"]["arguments"]
            if fits(name, arguments):
                self.done.append((name, *arguments.values()))
                text = "The case is closed." if name == "close_case" else answer_to(self.case, name, *arguments.values())
            else:
                text = "That cannot be done."
            answers.append(dict(role="tool", name=name, content=text))
        return answers, len(self.done) > 30


class Environment:
    name = {name!r}
    tools = TOOLS

    def size(self, split):
        return 3000

    def tasks(self, split, count):
        first = dict(discovery=10_000, training=20_000, test=30_000).get(split, 40_000)
        return [dict(id=f"{name}.{{split}}.{{n}}", split=split, data=dict(number=first + n)) for n in range(count)]

    def open(self, task):
        return Run(task["data"]["number"])

    def score(self, task, messages):
        run = self.open(task)
        for message in messages:
            if message["role"] == "assistant":
                run.step(message)
        gone = [one for one in run.done if one[0] == "close_case"]
        reached = [] if gone or run.report is None else milestones(run.case, run.done, run.report)
        reward = sum(reached) / max(1, len(reached)) if all(reached) else 0.2 * sum(reached) / max(1, len(reached))
        return dict(reward=reward, success=bool(reached) and all(reached), parts={{f"milestone {{n}}": float(m) for n, m in enumerate(reached)}})

    def reference(self, task):
        return way(case_of(Random(task["data"]["number"])), True)

    def broken(self, task):
        return way(case_of(Random(task["data"]["number"])), False)
"""

ENVIRONMENTS: dict[str, tuple[str, list[dict[str, object]], str, str]] = {
    # Find the free window seat; a second move overwrites the first.
    "seats": (COMPARED, [tool("cabin", "Seats of a flight.", flight="string"), tool("move", "Move a passenger.", passenger="string", seat="string")],
              "Look at the cabin before you move anybody.", '''
    def cabin(self, *, flight):
        return self.state["seats"] if flight == self.state["flight"] else {}

    def move(self, *, passenger, seat):
        if self.state["seats"][seat]["taken"] or passenger != self.state["passenger"]:
            raise ValueError("not possible")
        self.state["seats"][seat]["taken"] = passenger
        return {"seat": seat}


def draw(rng):
    names = [f"{row}{letter}" for row, letter in zip(rng.sample(range(10, 40), 5), "ABCDF")]
    rng.shuffle(names)
    goal = rng.choice(names)
    seats = {n: {"at": "window" if n == goal or rng.random() < 0.4 else "aisle", "taken": ""} for n in names}
    for n, seat in seats.items():
        seat["taken"] = "X" if n != goal and seat["at"] == "window" else ""
    seats[next(n for n in names if n != goal)].update(at="aisle", taken="")
    state = {"flight": f"LX{rng.randint(100, 999)}", "passenger": f"P{rng.randint(1000, 9999)}", "seats": seats}
    ask = rng.choice(["Passenger {} on {} wants a window seat.", "{}, flight {}: to the window, please.", "Could {} on {} sit at the window?"])
    return ask.format(state["passenger"], state["flight"]), state, goal


def plan(state, goal, wrong):
    seat = next(n for n, s in state["seats"].items() if s["at"] == "aisle" and not s["taken"]) if wrong else goal
    return [use("cabin", flight=state["flight"]), use("move", passenger=state["passenger"], seat=seat), end("Moved to the window.")]
'''),
    # One of several orders arrived broken; a refund is an entry in a list.
    "refunds": (COMPARED, [tool("orders", "Orders of a customer.", customer="string"), tool("condition", "How an order arrived.", order="string"), tool("refund", "Refund an order.", order="string", cents="integer")],
                "Refund what arrived broken, in full. Do not refund anything else.", '''
    def orders(self, *, customer):
        return [{"order": key, "cents": one["cents"]} for key, one in self.state["orders"].items()] if customer == self.state["customer"] else []

    def condition(self, *, order):
        return self.state["orders"][order]["condition"]

    def refund(self, *, order, cents):
        if not isinstance(cents, int) or cents > self.state["orders"][order]["cents"]:
            raise ValueError("too much")
        self.state["refunded"].append([order, cents])
        return "refunded"


def draw(rng):
    keys = [f"o-{n}" for n in rng.sample(range(1000, 9999), rng.randint(3, 5))]
    goal = rng.choice(keys)
    orders = {k: {"cents": rng.randint(500, 9000), "condition": "broken" if k == goal else rng.choice(["fine", "used"])} for k in keys}
    customer = f"C{rng.randint(100, 999)}"
    return f"{rng.choice(['Hello,', 'Hi!', 'Good day.'])} {rng.choice(['something', 'an order'])} of {customer} came broken.", {"customer": customer, "orders": orders, "refunded": []}, goal


def plan(state, goal, wrong):
    looks = [use("condition", order=key) for key in state["orders"]]
    key = next(k for k in state["orders"] if (k != goal) == wrong)
    return [use("orders", customer=state["customer"]), *looks, use("refund", order=key, cents=state["orders"][key]["cents"]), end("It is refunded.")]
'''),
    # Compute a number from two values that have to be looked up.
    "payroll": (COMPARED, [tool("salary", "Salary of an employee.", employee="string"), tool("bonus", "Percentage of a grade.", grade="string"), tool("pay", "Pay a bonus.", employee="string", amount="integer")],
                "The bonus is the salary times the percentage of the grade, over 100.", '''
    def salary(self, *, employee):
        return {"salary": self.state["salary"], "grade": self.state["grade"]} if employee == self.state["employee"] else None

    def bonus(self, *, grade):
        return self.state["bonus"][grade]

    def pay(self, *, employee, amount):
        if employee != self.state["employee"] or type(amount) is not int:
            raise ValueError("refused")
        self.state["paid"].append(amount)
        return "paid"


def draw(rng):
    state = {"employee": f"E-{rng.randint(100, 999)}", "salary": rng.randint(20, 90) * 100, "grade": rng.choice("ABC"),
             "bonus": dict(zip("ABC", rng.sample(range(5, 40), 3))), "paid": []}
    return f"{rng.choice(['Pay', 'Please pay', 'Send'])} {state['employee']} the yearly bonus{rng.choice(['.', '!', ', please.'])}", state, ""


def plan(state, goal, wrong):
    grade = next(g for g in "ABC" if (g != state["grade"]) == wrong)
    amount = state["salary"] * state["bonus"][grade] // 100
    return [use("salary", employee=state["employee"]), use("bonus", grade=state["grade"]), use("pay", employee=state["employee"], amount=amount), end("Paid.")]
'''),
    # Several writes; each sets a flag that may be set again at no cost.
    "accounts": (COMPARED, [tool("accounts", "Accounts of a team.", team="string"), tool("revoke", "Revoke an account.", account="string")],
                 "Revoke accounts that were not used for 90 days. Keep all others.", '''
    def accounts(self, *, team):
        return self.state["accounts"] if team == self.state["team"] else {}

    def revoke(self, *, account):
        self.state["accounts"][account]["open"] = False
        return "ok"


def draw(rng):
    names = [f"acc{n}" for n in rng.sample(range(100, 999), rng.randint(4, 6))]
    days = [rng.randint(100, 300), rng.randint(100, 300), rng.randint(1, 80), *(rng.choice([5, 20, 150]) for _ in names[3:])]
    rng.shuffle(days)
    accounts = {n: {"idle": d, "open": True} for n, d in zip(names, days)}
    team = f"team-{rng.randint(10, 99)}"
    return rng.choice(["Clean up {}.", "Old accounts of {} must go.", "Please tidy {}."]).format(team), {"team": team, "accounts": accounts}, ""


def plan(state, goal, wrong):
    stale = [n for n, a in state["accounts"].items() if a["idle"] >= 90]
    return [use("accounts", team=state["team"]), *(use("revoke", account=n) for n in stale[: len(stale) - wrong]), end("Tidied.")]
'''),
    # Ask the caller for a date of birth and check it against the record.
    "pharmacy": (SCRIPTED, [tool("record", "Record of a patient.", patient="string"), tool("refill", "Refill a prescription.", patient="string", drug="string"), tool("decline", "Decline.", patient="string", drug="string")],
                 "Ask for the birth date. Decline if it is not that of the record.", '''
DRUGS = ["Aspirin", "Insulin", "Codeine", "Zinc"]


def facts_of(rng):
    day = f"{rng.randint(1, 28)}.{rng.randint(1, 12)}.{rng.randint(1940, 2009)}"
    told = day if rng.random() < 0.5 else f"{rng.randint(1, 28)}.{rng.randint(1, 12)}.{rng.randint(1900, 1939)}"
    patient, drug = f"PT{rng.randint(100, 999)}", rng.choice(DRUGS)
    opening = rng.choice(["{} for {}, please.", "I need more {}. I am {}.", "Refill of {} for {}!"]).format(drug, patient)
    return {"opening": opening, "patient": patient, "drug": drug, "born": day, "told": told, "answers": {"birth": f"It is {told}."}}


def handle(facts, log, name, arguments):
    if arguments["patient"] != facts["patient"]:
        return "No such patient."
    if name == "record":
        return f"Born {facts['born']}."
    log.append((name, arguments["drug"]))
    return "Noted."


def log_of(facts):
    return [("refill" if facts["born"] == facts["told"] else "decline", facts["drug"])]


def steps_of(facts, broken):
    name = ["refill", "decline"][(facts["born"] != facts["told"]) != broken]
    return [(SAY, "What is your birth date?"), (DO, "record", {"patient": facts["patient"]}),
            (DO, name, {"patient": facts["patient"], "drug": facts["drug"]}), (SAY, "That is noted.")]
'''),
    # What to do depends on a status in the record and on the caller's answer.
    "helpdesk": (SCRIPTED, [tool("status", "Status of a device.", device="string"), tool("reboot", "Reboot a device.", device="string"), tool("replace", "Send another device.", device="string", city="string")],
                 "Ask for the device. Reboot a device that is online; replace one that is offline, once you have asked for the city.", '''
def facts_of(rng):
    device, city = f"RX-{rng.randint(1000, 9999)}", rng.choice(["Bern", "Oslo", "Turin", "Lille"])
    online = rng.random() < 0.5
    answers = {"device": f"It says {device}."} | ({} if online else {"city": f"To {city}."})
    opening = rng.choice(["It does not work.", "My thing is broken.", "Help, no signal!", "Nothing happens any more."]) + rng.choice(["", " Since today.", " Since a week.", " Again."])
    return {"opening": opening, "device": device, "city": city, "online": online, "answers": answers}


def handle(facts, log, name, arguments):
    if arguments["device"] != facts["device"]:
        return "Unknown device."
    if name == "status":
        return "online" if facts["online"] else "offline"
    log.append((name, arguments.get("city", "")))
    return "Done."


def log_of(facts):
    return [("reboot", "") if facts["online"] else ("replace", facts["city"])]


def steps_of(facts, broken):
    device, city = {"device": facts["device"]}, {"city": facts["city"] if not facts["online"] else "Bern"}
    act = (DO, "reboot", device) if facts["online"] != bool(broken) else (DO, "replace", device | city)
    asked = [] if facts["online"] else [(SAY, "To which city?")]
    return [(SAY, "Which device is it?"), (DO, "status", device), *asked, act, (SAY, "It is under way.")]
'''),
    # The price depends on the number of nights, which the caller tells when asked.
    "hotel": (SCRIPTED, [tool("rate", "Price of a night.", room="string"), tool("reserve", "Reserve a room.", room="string", nights="integer", total="integer")],
              "Ask how many nights. The total is nights times rate.", '''
def facts_of(rng):
    room, nights, rate = rng.choice(["single", "double", "suite"]), rng.randint(2, 9), rng.randint(41, 199)
    opening = rng.choice(["A {} please.", "I want a {}.", "Have you got a {}?", "One {}!"]).format(room) + rng.choice(["", " From today.", " With breakfast."])
    return {"opening": opening, "room": room, "nights": nights, "rate": rate, "answers": {"nights": f"{nights} nights."}}


def handle(facts, log, name, arguments):
    if name == "rate":
        return f"{facts['rate']} a night" if arguments["room"] == facts["room"] else "sold out"
    log.append((name, arguments["room"], arguments["nights"], arguments["total"]))
    return "Reserved."


def log_of(facts):
    return [("reserve", facts["room"], facts["nights"], facts["nights"] * facts["rate"])]


def steps_of(facts, broken):
    total = (facts["nights"] - broken) * facts["rate"]
    return [(SAY, "How many nights?"), (DO, "rate", {"room": facts["room"]}),
            (DO, "reserve", {"room": facts["room"], "nights": facts["nights"], "total": total}), (SAY, "It is reserved.")]
'''),
    # Follow a chain of pointers whose length the task does not tell.
    "parcels": (SEEDED, [tool("locate", "Where a parcel went from a place.", place="string"), tool("deliver", "Deliver from a place.", place="string")],
                "Follow the parcel to where it lies, and deliver it from there. Never deliver from a place that it has left.", '''
def case_of(rng):
    places = [f"hub{n}" for n in rng.sample(range(100, 999), rng.randint(3, 6))]
    ask = rng.choice(["The parcel was handed in at {}.", "Deliver what left {}.", "Where is what I gave to {}? Deliver it."])
    return dict(places=places, request=ask.format(places[0]))


def answer_to(case, name, place):
    if place not in case["places"]:
        return "Nobody knows that place."
    if name == "deliver":
        return "Delivered."
    rest = case["places"][case["places"].index(place) + 1:]
    return f"It went on to {rest[0]}." if rest else "It lies here."


def milestones(case, done, report):
    seen = [one[1] for one in done if one[0] == "locate"]
    return [*(place in seen for place in case["places"]), [one for one in done if one[0] == "deliver"] == [("deliver", case["places"][-1])]]


def way(case, right):
    end = case["places"][-1 if right else -2]
    return [*(act("locate", place=p) for p in case["places"]), act("deliver", place=end), dict(role="assistant", content="It is delivered.")]
'''),
    # Count something that no single tool returns; write it down and tell it at the end.
    "census": (SEEDED, [tool("street", "Houses of a street.", name="string"), tool("submit", "Submit the number of people.", name="string", people="integer")],
               "Count all people of the street, and submit the number once.", '''
def case_of(rng):
    name = rng.choice(["Elm", "Oak", "Ash", "Fir"]) + f"-{rng.randint(10, 99)}"
    houses = [rng.randint(11, 60) for _ in range(rng.randint(3, 5))]
    return dict(name=name, houses=houses, request=rng.choice(["Count {}.", "How many people live in {}? Submit it.", "The census of {}, please."]).format(name))


def answer_to(case, name, street, people=0):
    if street != case["name"]:
        return "No such street."
    if name == "submit":
        return "Submitted."
    return "; ".join(f"house {n}: {count} people" for n, count in enumerate(case["houses"], 1))


def milestones(case, done, report):
    return [("street", case["name"]) in done, [one for one in done if one[0] == "submit"] == [("submit", case["name"], sum(case["houses"]))]]


def way(case, right):
    people = sum(case["houses"]) - (0 if right else case["houses"][0])
    return [act("street", name=case["name"]), act("submit", name=case["name"], people=people), dict(role="assistant", content=f"There are {people} people.")]
'''),
    # No writes: find and tell which build failed first.
    "builds": (SEEDED, [tool("build", "Result of a build.", number="integer"), tool("range", "First and last build.", project="string")],
               "Tell the number of the first build that failed. You may look at any builds.", '''
def case_of(rng):
    first = rng.randint(100, 900)
    count = rng.randint(4, 7)
    project = rng.choice(["web", "core", "docs"]) + str(rng.randint(10, 99))
    return dict(first=first, last=first + count, bad=first + rng.randint(1, count - 1), project=project,
                request=rng.choice(["Since when does {} fail?", "{} is red. Since which build?", "Find the first bad build of {}."]).format(project))


def answer_to(case, name, value):
    if name == "range":
        return f"Builds {case['first']} to {case['last']}." if value == case["project"] else "No such project."
    return "no such build" if not case["first"] <= value <= case["last"] else "failed" if value >= case["bad"] else "passed"


def milestones(case, done, report):
    looked = {one[1] for one in done if one[0] == "build"}
    told = [word.strip(".,!") for word in report.split()]
    numbers = [word for word in told if word.isdigit() and case["first"] <= int(word) <= case["last"]]
    return [{case["bad"] - 1, case["bad"]} <= looked, numbers == [str(case["bad"])]]


def way(case, right):
    looks = [act("build", number=n) for n in range(case["first"], case["bad"] + 1)]
    return [act("range", project=case["project"]), *looks, dict(role="assistant", content=f"Since build {case['bad'] - (not right)}.")]
'''),
}  # fmt: skip
"""Name -> frame, tools, policy, and the parts in which they differ."""
