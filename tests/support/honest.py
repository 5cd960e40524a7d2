# ruff: noqa: E501
"""Honest environments in the styles of several authors. The checks must accept all of them.

`frame` builds an environment file from the parts that differ: task data, request, tool answers (JSON or prose, strict
or lenient), reference, broken form, and reward.
"""

from support.authors import ENVIRONMENTS, tool

FRAME = """
import json
import random

TOOLS = {tools!r}
POLICY = {policy!r}


def call(name, /, **arguments):
    return {{"role": "assistant", "content": "", "tool_calls": [
        {{"type": "function", "function": {{"name": name, "arguments": arguments}}}}]}}


def say(text):
    return {{"role": "assistant", "content": text}}


{parts}


class Episode:
    def __init__(self, data):
        self.data, self.state, self.said, self.calls, self.turns = data, start(data), [], [], 0
        self.messages = [{{"role": "system", "content": POLICY}}, {{"role": "user", "content": data["request"]}}]

    def step(self, message):
        self.turns += 1
        replies = []
        for one in message.get("tool_calls") or []:
            name, arguments = one["function"]["name"], one["function"]["arguments"]
            schema = next((t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name), None)
            text = "Error: bad call"
            if schema and isinstance(arguments, dict) and set(arguments) == set(schema["required"]) and all(
                isinstance(v, int if schema["properties"][k]["type"] == "integer" else str) for k, v in arguments.items()
            ):
                try:
                    result = "closed" if name == "close_case" else run(self.data, self.state, name, arguments)
                    text = result if isinstance(result, str) else json.dumps(result)
                    self.calls.append([name, arguments])
                except (KeyError, ValueError) as error:
                    text = f"Error: {{error}}"
            replies.append({{"role": "tool", "name": name, "content": text}})
        if not replies:
            self.said.append(message.get("content") or "")
            answer = hear(self.data, self.said)
            return ([{{"role": "user", "content": answer}}], False) if answer else ([], True)
        return replies, self.turns >= 20


class Environment:
    name = {name!r}
    tools = TOOLS

    def tasks(self, split, count):
        return [{{"id": f"{{self.name}}/{{split}}/{{i}}", "split": split,
                 "data": make(random.Random(f"{{self.name}}{{split}}{{i}}"))}} for i in range(count)]

    def open(self, task):
        return Episode(task["data"])

    def score(self, task, messages):
        episode = self.open(task)
        for message in messages:
            if message["role"] == "assistant":
                episode.step(message)
        given_up = any(one[0] == "close_case" for one in episode.calls)
        reward = 0.0 if given_up else pay(task["data"], episode)
        return {{"reward": reward, "success": reward == 1.0, "parts": {{}}}}

    def reference(self, task):
        return solve(task["data"], False)

    def broken(self, task):
        return solve(task["data"], True)


def hear(data, said):
    return ""


def start(data):
    return {{}}


{overrides}
"""


HONEST: dict[str, tuple[list[dict[str, object]], str, str, str]] = {
    # A bank: compute a sum; the final state is compared, all or nothing; answers in prose.
    "bank": ([tool("balance", "Balance of an account.", account="string"),
              tool("transfer", "Send money.", source="string", target="string", amount="integer")],
             "You work for a bank. Never transfer more than a customer has.", '''
def make(rng):
    a, b, c = rng.sample(range(1000, 9999), 3)
    have, keep = rng.randint(300, 900), rng.randint(50, 200)
    how = rng.choice(["Keep", "Please keep", "I want to keep"])
    return {"a": f"DE{a}", "b": f"DE{b}", "have": have, "keep": keep,
            "request": f"{how} {keep} on DE{a} and send the rest to DE{b}." + rng.choice(["", " Thanks!", " It is urgent."])}

def run(data, state, name, arguments):
    if name == "balance":
        return f"The balance of {arguments['account']} is {data['have'] if arguments['account'] == data['a'] else 0}."
    state.setdefault("sent", []).append([arguments["source"], arguments["target"], arguments["amount"]])
    return "Sent."

def solve(data, broken):
    amount = data["have"] - data["keep"] - 100 * broken
    return [call("balance", account=data["a"]), call("transfer", source=data["a"], target=data["b"], amount=amount), say("I sent it.")]

def pay(data, episode):
    return float(episode.state.get("sent") == [[data["a"], data["b"], data["have"] - data["keep"]]])
''', ""),
    # A calendar: dates in another format; calls are compared in order.
    "calendar": ([tool("find", "Events of a person.", person="string"), tool("move", "Move an event.", event="string", date="string")],
                 "Move what is asked for. Dates are written YYYY-MM-DD.", '''
def make(rng):
    events = {f"ev-{n}": rng.choice(["lunch", "review", "standup", "dentist"]) for n in rng.sample(range(100, 999), 4)}
    key = rng.choice(list(events))
    for other in events:
        events[other] = events[other] if other == key else "talk"
    person, day, month = rng.choice(["Ann", "Bo", "Cy"]), rng.randint(1, 28), rng.randint(1, 12)
    ask = rng.choice(["Move", "Shift", "Could you move"])
    return {"events": events, "key": key, "person": person, "date": f"2025-{month:02d}-{day:02d}",
            "request": f"{ask} {person}'s {events[key]} to {day}.{month}.2025"}

def run(data, state, name, arguments):
    if name == "find":
        return data["events"] if arguments["person"] == data["person"] else {}
    if arguments["event"] not in data["events"]:
        raise KeyError(arguments["event"])
    return {"moved": arguments["event"]}

def solve(data, broken):
    key = next(e for e in data["events"] if (e != data["key"]) == broken)
    return [call("find", person=data["person"]), call("move", event=key, date=data["date"]), say("Moved.")]

def pay(data, episode):
    moves = [c for c in episode.calls if c[0] == "move"]
    return float(moves == [["move", {"event": data["key"], "date": data["date"]}]] and bool(episode.said))
''', ""),
    # A greenhouse: the look-up decides between two tools, only one of which takes the litres.
    "greenhouse": ([tool("measure_soil", "How wet a bed is.", bed="string"), tool("water_bed", "Water a bed.", bed="string", litres="string"),
                    tool("skip_bed", "Leave a bed as it is.", bed="string")],
                   "Measure each bed before you water it. Water dry beds, and skip the others.", '''
def make(rng):
    beds = [f"B{n}" for n in rng.sample(range(100, 160), rng.choice([1, 1, 2]))]
    one = {bed: {"soil": rng.choice(["dry", "dry", "moist", "soaked"]), "litres": str(rng.randint(2, 29))} for bed in beds}
    wish = " and ".join(f"bed {bed} with {one[bed]['litres']} litres" for bed in beds)
    return {"beds": one, "request": f"Please water {wish}."}

def run(data, state, name, arguments):
    bed = arguments["bed"]
    if name == "measure_soil":
        return {"soil": data["beds"][bed]["soil"]}
    state.setdefault("done", []).append([name, *arguments.values()])
    return {"ok": bed in data["beds"]}

def due(data):
    return [["water_bed", bed, one["litres"]] if one["soil"] == "dry" else ["skip_bed", bed] for bed, one in data["beds"].items()]

def solve(data, broken):
    messages = []
    for name, bed, *litres in due(data):
        wrong = broken and not messages
        if wrong:
            name, litres = ("skip_bed", []) if name == "water_bed" else ("water_bed", [data["beds"][bed]["litres"]])
        messages += [call("measure_soil", bed=bed), call(name, bed=bed, **({"litres": litres[0]} if litres else {}))]
    return [*messages, say("All done.")]

def pay(data, episode):
    return float(sorted(episode.state.get("done", [])) == sorted(due(data)) and bool(episode.said))
''', ""),
    # Questions only: no writes; the last message must contain the number; partial credit.
    "librarian": ([tool("copies", "Copies of a book.", title="string")],
                  "Answer with the number of copies.", '''
TITLES = ["Emma", "Ulysses", "Walden", "Dracula", "Hamlet", "Ivanhoe"]

def make(rng):
    one, two = rng.sample(TITLES, 2)
    ask = rng.choice(["How many copies of {} and {} are there together?", "Count {} and {}.", "{} and {}: how many in all?", "I look for {} and {}, all copies.", "Sum of {} and {}!", "{} plus {}?"])
    return {"one": one, "two": two, "stock": {t: rng.randint(40, 400) for t in TITLES}, "request": ask.format(one, two)}

def run(data, state, name, arguments):
    return str(data["stock"][arguments["title"]])

def solve(data, broken):
    total = data["stock"][data["one"]] + data["stock"][data["two"]] + broken
    return [call("copies", title=data["one"]), call("copies", title=data["two"]), say(f"There are {total} copies.")]

def pay(data, episode):
    looked = {c[1]["title"] for c in episode.calls} >= {data["one"], data["two"]}
    words = (episode.said or [""])[-1].replace(".", " ").split()
    right = str(data["stock"][data["one"]] + data["stock"][data["two"]]) in words and looked
    return 0.2 * looked + 0.8 * right
''', ""),
    # The agent must ask the user first.
    "shy_user": ([tool("book", "Book a table.", people="integer", time="string")],
                 "Ask for the time before you book.", '''
def make(rng):
    return {"people": rng.randint(2, 9), "time": f"{rng.randint(10, 22)}:{rng.choice(['00', '15', '30', '45'])}",
            "request": rng.choice(["A table for {} please.", "Book a table for {}.", "We are {}.", "Dinner, {} of us.", "{} people.", "Can {} come?"])}

def run(data, state, name, arguments):
    state["booked"] = arguments
    return "booked"

def solve(data, broken):
    hour = data["time"] if not broken else "09:00"
    return [say("At what time?"), call("book", people=data["people"], time=hour), say("It is booked.")]

def pay(data, episode):
    booked = [c[1] for c in episode.calls]
    return float(booked == [{"people": data["people"], "time": data["time"]}])
''', '''
def hear(data, said):
    return f"At {data['time']}, please." if len(said) == 1 and "time" in said[0].lower() else ""

_make = make

def make(rng):
    data = _make(rng)
    return {**data, "request": data["request"].format(data["people"])}
'''),
    # A warehouse: several writes, each counts.
    "warehouse": ([tool("stock", "Items of a shelf.", shelf="string"), tool("ship", "Ship an item.", item="string"), tool("scrap", "Scrap an item.", item="string")],
                  "Look at the shelf. Do not scrap items that are new.", '''
def make(rng):
    items = {f"it{n}": rng.choice(["new", "old"]) for n in rng.sample(range(100, 999), rng.randint(4, 6))}
    first, second = list(items)[:2]
    items[first], items[second] = "new", "old"
    pairs = list(items.items())
    rng.shuffle(pairs)
    shelf = f"S-{rng.randint(10, 99)}"
    ask = rng.choice(["Ship all new items of shelf", "Send out what is new on", "All that is new must go from"])
    return {"items": dict(pairs), "shelf": shelf, "request": f"{ask} {shelf}."}

def run(data, state, name, arguments):
    if name == "stock":
        return "; ".join(f"{k}: {v}" for k, v in data["items"].items()) if arguments["shelf"] == data["shelf"] else "empty"
    if arguments["item"] not in data["items"]:
        raise ValueError("no such item")
    state[arguments["item"]] = name
    return {"ok": True}

def solve(data, broken):
    new = [k for k, v in data["items"].items() if v == "new"]
    ships = [call("ship", item=k) for k in new[: len(new) - broken]]
    return [call("stock", shelf=data["shelf"]), *ships, say("Shipped.")]

def pay(data, episode):
    wanted = {k: "ship" for k, v in data["items"].items() if v == "new"}
    return 1.0 if episode.state == wanted and episode.said else 0.3 * (set(wanted) >= set(episode.state) and bool(episode.state))
''', ""),
    # Free text in an argument; the important words decide.
    "tickets": ([tool("read", "Read a ticket.", ticket="string"), tool("route", "Route a ticket.", ticket="string", team="string", reason="string")],
                "Teams: billing, network, hardware. Route by what the ticket says.", '''
TEAMS = {"billing": "invoice is wrong", "network": "cannot connect", "hardware": "screen is broken"}

def make(rng):
    team, ticket = rng.choice(list(TEAMS)), f"T{rng.randint(1000, 9999)}"
    return {"team": team, "ticket": ticket, "request": rng.choice(["Route", "Please route", "Handle"]) + f" ticket {ticket}" + rng.choice([".", " now.", "!"])}

def run(data, state, name, arguments):
    if arguments["ticket"] != data["ticket"]:
        raise KeyError("unknown")
    if name == "read":
        return {"text": "My " + TEAMS[data["team"]]}
    if arguments["team"] not in TEAMS:
        raise ValueError("unknown team")
    state["team"] = state.get("team", "") + arguments["team"]
    return "ok"

def solve(data, broken):
    team = data["team"] if not broken else next(t for t in TEAMS if t != data["team"])
    return [call("read", ticket=data["ticket"]), call("route", ticket=data["ticket"], team=team, reason="It says so."), say("Routed.")]

def pay(data, episode):
    return float(episode.state.get("team") == data["team"] and any(c[0] == "read" for c in episode.calls))
''', ""),
    # Two look-ups in a row and a percentage; ends by a call, without a last message.
    "discount": ([tool("customer", "A customer's level.", name="string"), tool("price", "An article's price.", article="string"), tool("quote", "Quote a price.", article="string", cents="integer")],
                 "Gold customers pay 80 percent, silver customers 90 percent.", '''
def make(rng):
    name, level = rng.choice(["Gil", "Hal", "Ida", "Jo"]), rng.choice(["gold", "silver"])
    article, cents = f"A-{rng.randint(100, 999)}", rng.randint(10, 90) * 100
    return {"name": name, "level": level, "article": article, "cents": cents,
            "request": rng.choice(["{} wants {}.", "Quote for {}: {}.", "What does {} pay for {}?"]).format(name, article)}

def run(data, state, name, arguments):
    if name == "customer":
        return data["level"] if arguments["name"] == data["name"] else "unknown"
    if arguments["article"] != data["article"]:
        raise KeyError("article")
    if name == "price":
        return {"cents": data["cents"]}
    state["quotes"] = state.get("quotes", []) + [arguments["cents"]]
    return "quoted"

def solve(data, broken):
    share = 80 if (data["level"] == "gold") != broken else 90
    return [call("customer", name=data["name"]), call("price", article=data["article"]),
            call("quote", article=data["article"], cents=data["cents"] * share // 100)]

def pay(data, episode):
    return float(episode.state.get("quotes") == [data["cents"] * (80 if data["level"] == "gold" else 90) // 100])
''', ""),
    # The order of steps decides.
    "checklist": ([tool("steps", "Steps of a procedure.", procedure="string"), tool("do", "Do a step.", step="string")],
                  "Do every step in the order of the procedure.", '''
def make(rng):
    steps = rng.sample(["drain", "vent", "lock", "tag", "test", "clean"], rng.randint(3, 5))
    name = f"P{rng.randint(10, 99)}"
    return {"steps": steps, "name": name, "request": rng.choice(["Run", "Do", "Carry out"]) + f" procedure {name}."}

def run(data, state, name, arguments):
    if name == "steps":
        return " then ".join(data["steps"]) if arguments["procedure"] == data["name"] else "none"
    if arguments["step"] not in data["steps"]:
        raise ValueError("no step")
    return "done"

def solve(data, broken):
    steps = list(data["steps"])
    done = [call("do", step=s) for s in steps[: len(steps) - broken]]
    return [call("steps", procedure=data["name"]), *done, say("All steps are done.")]

def pay(data, episode):
    done = [c[1]["step"] for c in episode.calls if c[0] == "do"]
    right = 0
    for made, wanted in zip(done, data["steps"]):
        if made != wanted:
            break
        right += 1
    return float(done == data["steps"]) if done == data["steps"] else 0.3 * right / len(data["steps"])
''', ""),
    # Refusing is right in half of the tasks.
    "gatekeeper": ([tool("badge", "Data of a badge.", badge="string"), tool("admit", "Open the door.", badge="string"), tool("refuse", "Refuse.", badge="string")],
                   "Admit badges that are valid. Never admit a badge that has expired.", '''
def make(rng):
    badge, valid = f"B{rng.randint(1000, 9999)}", rng.random() < 0.5
    return {"badge": badge, "valid": valid, "request": rng.choice(["Let me in,", "Open up,", "Good morning,"]) + f" my badge is {badge}" + rng.choice([".", "!", ", thanks."])}

def run(data, state, name, arguments):
    if arguments["badge"] != data["badge"]:
        raise KeyError("badge")
    if name == "badge":
        return {"state": "valid" if data["valid"] else "expired"}
    state["did"] = state.get("did", []) + [name]
    return "ok"

def solve(data, broken):
    name = "admit" if data["valid"] != broken else "refuse"
    return [call("badge", badge=data["badge"]), call(name, badge=data["badge"]), say("Done.")]

def pay(data, episode):
    looked = any(c[0] == "badge" for c in episode.calls)
    return 0.2 * looked + 0.8 * (looked and episode.state.get("did") == ["admit" if data["valid"] else "refuse"])
''', ""),
    # A value to copy exactly; no look-up is needed.
    "spelling": ([tool("register", "Register a serial number.", serial="string"), tool("help", "Show help.", topic="string")],
                 "Register serial numbers exactly as they are given.", '''
def make(rng):
    serial = "".join(rng.choice("ABCDEFGH0123456789") for _ in range(8)) + str(rng.randint(10, 99))
    ask = rng.choice(["Register {}.", "My device is {}.", "Please enter serial {} for me.", "{} is the number."])
    return {"serial": serial, "request": ask.format(serial) + rng.choice(["", " Thank you.", " Be quick."])}

def run(data, state, name, arguments):
    if name == "help":
        return "Give the serial number."
    state["serials"] = state.get("serials", []) + [arguments["serial"]]
    return "registered"

def solve(data, broken):
    serial = data["serial"] if not broken else data["serial"][:-1] + str((int(data["serial"][-1]) + 1) % 10)
    return [call("register", serial=serial), say("Registered.")]

def pay(data, episode):
    return float(episode.state.get("serials") == [data["serial"]] and bool(episode.said))
''', ""),
    # Any free room is right; the broken one takes a room that is occupied.
    "any_free_room": ([tool("rooms","Rooms of a house.",house="string"),tool("room","State of a room.",room="string"),tool("book","Book a room.",room="string",guest="string")], "Look at rooms before you book a free one.", '''
def make(rng):
    rooms = {f"R{n}": rng.choice(["free", "occupied", "repair"]) for n in rng.sample(range(100, 999), 5)}
    a, b = rng.sample(list(rooms), 2)
    rooms[a], rooms[b] = "free", "occupied"
    house, guest = f"H{rng.randint(10, 99)}", f"G-{rng.randint(100, 999)}"
    return {"rooms": rooms, "house": house, "guest": guest, "request": rng.choice(["A room in {} for {}.", "Book {}: guest {}", "House {}, guest {}, please.", "I need a room at {}. I am {}.", "{} for {}!"]).format(house, guest)}

def run(data, state, name, arguments):
    if name == "rooms":
        return list(data["rooms"]) if arguments["house"] == data["house"] else []
    if name == "room":
        return data["rooms"][arguments["room"]]
    if arguments["room"] not in data["rooms"]:
        raise KeyError("room")
    state["booked"] = state.get("booked", []) + [[arguments["room"], arguments["guest"]]]
    return "booked"

def solve(data, broken):
    pick = next(r for r, s in data["rooms"].items() if s == ("occupied" if broken else "free"))
    looks = []
    for r, s in data["rooms"].items():
        looks.append(call("room", room=r))
        if s == "free":
            break
    return [call("rooms", house=data["house"]), *looks, call("book", room=pick, guest=data["guest"]), say("Booked.")]

def pay(data, episode):
    b = episode.state.get("booked", [])
    return float(len(b) == 1 and data["rooms"].get(b[0][0]) == "free" and b[0][1] == data["guest"])
''', ""),
    # A busy system: the call must be made again until it is accepted.
    "busy_system": ([tool("slots","Slots of a day.",day="string"),tool("reserve","Reserve a slot.",slot="string")], "Reserve the first slot of the list; if the system is busy, try the same slot again.", '''
def make(rng):
    slots = [f"{h}:{m:02d}" for h, m in zip(rng.sample(range(8, 20), 4), rng.sample(range(10, 60), 4))]
    day = f"2025-0{rng.randint(1, 9)}-{rng.randint(10, 28)}"
    return {"slots": slots, "day": day, "busy": rng.randint(0, 2), "want": rng.choice(["earliest", "latest"]), "request": ""}

def run(data, state, name, arguments):
    if name == "slots":
        return data["slots"] if arguments["day"] == data["day"] else []
    if arguments["slot"] not in data["slots"]:
        raise ValueError("no such slot")
    state["tries"] = state.get("tries", 0) + 1
    if state["tries"] <= data["busy"]:
        return "busy, try again"
    state["got"] = state.get("got", []) + [arguments["slot"]]
    return "reserved"

def right(data):
    return (min if data["want"] == "earliest" else max)(data["slots"], key=lambda s: int(s.split(":")[0]))

def solve(data, broken):
    slot = right(data) if not broken else (max if data["want"] == "earliest" else min)(data["slots"], key=lambda s: int(s.split(":")[0]))
    good = right(data)
    return [call("slots", day=data["day"]), *[call("reserve", slot=good)] * data["busy"], call("reserve", slot=slot), say("Reserved.")]

def pay(data, episode):
    return float(episode.state.get("got") == [right(data)])
''', '''
_make = make

def make(rng):
    d = _make(rng)
    d["request"] = rng.choice(["The {w} slot on {d}.", "On {d}, as {w} as possible: the {w}", "{d}: {w} please"]).format(w=d["want"], d=d["day"])
    return d
'''),
    # Writes are validated by the system, and looking is demanded.
    "validated": ([tool("list_cases","Cases of a client.",client="string"),tool("open_case","A case.",case="string"),tool("archive","Archive a case.",case="string")], "Open all cases; archive the one that is settled.", '''
def make(rng):
    cases = {f"C{n}": rng.choice(["running", "appealed"]) for n in rng.sample(range(1000, 9999), rng.randint(3, 5))}
    goal = rng.choice(list(cases))
    cases[goal] = "settled"
    client = f"K{rng.randint(10, 99)}"
    return {"cases": cases, "goal": goal, "client": client, "request": rng.choice(["Archive what is settled for {}.", "{}: one case is over, archive it.", "Client {} has a settled case to archive.", "Put the settled case of {} away.", "Tidy up for {}!"]).format(client)}

def run(data, state, name, arguments):
    if name == "list_cases":
        return list(data["cases"]) if arguments["client"] == data["client"] else []
    status = data["cases"][arguments["case"]]
    if name == "open_case":
        return {"status": status}
    if status != "settled":
        state["refused"] = state.get("refused", 0) + 1
        raise ValueError("not settled")
    state["archived"] = True
    return "archived"

def solve(data, broken):
    pick = data["goal"] if not broken else next(c for c in data["cases"] if c != data["goal"])
    return [call("list_cases", client=data["client"]), *[call("open_case", case=c) for c in data["cases"]], call("archive", case=pick), say("Archived.")]

def pay(data, episode):
    opened = {c[1]["case"] for c in episode.calls if c[0] == "open_case"} >= {*data["cases"]}
    return float(opened and bool(episode.state.get("archived")) and not episode.state.get("refused"))
''', ""),
    # The decision is 'no' in three of four tasks, and looking is part of the reward.
    "mostly_no": ([tool("credit","Credit of a person.",person="string"),tool("grant","Grant a loan.",person="string"),tool("reject","Reject a loan.",person="string")], "Grant a loan if the credit is good.", '''
def make(rng):
    person = f"P{rng.randint(1000, 9999)}"
    return {"person": person, "good": rng.random() < 0.25, "request": rng.choice(["A loan for {}?", "{} asks for a loan.", "May {} have a loan", "Loan, {}.", "Decide for {}."]).format(person)}

def run(data, state, name, arguments):
    if arguments["person"] != data["person"]:
        raise KeyError("person")
    if name == "credit":
        return "good" if data["good"] else poor(data)
    state["did"] = state.get("did", []) + [name]
    return "ok"

def poor(data):
    return "bad" if int(data["person"][1:]) % 2 else "none"

def solve(data, broken):
    return [call("credit", person=data["person"]), call("grant" if data["good"] != bool(broken) else "reject", person=data["person"]), say("Decided.")]

def pay(data, episode):
    looked = any(c[0] == "credit" for c in episode.calls)
    right = episode.state.get("did") == ["grant" if data["good"] else "reject"]
    return 0.4 * looked * right + 0.6 * right
''', ""),
    # Few tasks, lenient ids.
    "few_and_lenient": ([tool("tickets","Open tickets.",user="string"),tool("ticket","A ticket.",ticket="string"),tool("close","Close a ticket.",ticket="string")], "Close the ticket about the printer.", '''
ABOUT = ["mouse", "screen", "network", "login"]

def make(rng):
    tickets = {f"#{n}": rng.choice(ABOUT) for n in rng.sample(range(100, 999), 4)}
    goal = rng.choice(list(tickets))
    tickets[goal] = "printer"
    user = rng.choice(["amy", "ben", "col", "dot"]) + str(rng.randint(1, 99))
    return {"tickets": tickets, "goal": goal, "user": user, "request": rng.choice(["{} here. The printer works again.", "I am {}: close the printer thing", "Printer is fine now ({})", "User {}, printer fixed", "printer ok! {}"]).format(user)}

def clean(ticket):
    return "#" + ticket.strip().lstrip("#")

def run(data, state, name, arguments):
    if name == "tickets":
        return list(data["tickets"]) if arguments["user"].lower() == data["user"] else []
    about = data["tickets"][clean(arguments["ticket"])]
    if name == "ticket":
        state.setdefault("seen", []).append(clean(arguments["ticket"]))
        return {"about": about}
    state.setdefault("closed", []).append(clean(arguments["ticket"]))
    return "closed"

def solve(data, broken):
    pick = data["goal"] if not broken else next(t for t in data["tickets"] if t != data["goal"])
    return [call("tickets", user=data["user"]), *[call("ticket", ticket=t) for t in data["tickets"]], call("close", ticket=pick), say("Closed.")]

def pay(data, episode):
    return 1.0 * (episode.state.get("closed") == [data["goal"]] and data["goal"] in episode.state.get("seen", []))
''', '''
class Environment(Environment):
    def size(self, split):
        return 9

    def tasks(self, split, count):
        return super().tasks(split, min(count, 9))
'''),
}  # fmt: skip
"""Name -> tools, policy, parts, and replacements in the frame."""


HONEST_NAMES = [*HONEST, *ENVIRONMENTS]


def tools_of(name: str) -> list[dict[str, object]]:
    """Return the tools, plus one that gives up, so that calling every tool is not a solution."""
    tools = HONEST[name][0] if name in HONEST else ENVIRONMENTS[name][1]
    return [*tools, tool("close_case", "Give up.", reason="string")]


def honest(name: str) -> str:
    """Return the text of an honest environment file."""
    if name in ENVIRONMENTS:
        frame, _, policy, parts = ENVIRONMENTS[name]
        return frame.format(tools=tools_of(name), policy=policy, parts=parts, name=name)
    _, policy, parts, overrides = HONEST[name]
    return FRAME.format(tools=tools_of(name), policy=policy, parts=parts, name=name, overrides=overrides)
