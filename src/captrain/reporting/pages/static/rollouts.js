"use strict";
/* The table of rollouts: only the rows in view exist. What is opened is the part of the address after #; its messages
   come with a shard, a script that is loaded once. All text is set as text. */
const captrain = { shards: new Map(), waiting: new Map() };

function captrainShard(number, data) {
  captrain.shards.set(number, data);
}

function captrainRows(data) {
  const ROW = 36, SPARE = 8;
  const OUTCOMES = { p: "passed", f: "failed", e: "error" };
  const { arms, tasks, columns } = data;
  const total = columns.id.length;
  const at = (id) => document.getElementById(id);
  const grid = at("grid"), body = at("body"), space = at("space"), panel = at("panel");
  const place = new Map(columns.id.map((id, row) => [id, row]));
  const words = columns.id.map((id, row) => {
    const task = tasks[columns.task[row]];
    return `${id} ${task[0]} ${task[1]} ${arms[columns.arm[row]]} ${task[3]}`.toLowerCase();
  });
  // What all ids of tasks begin with says nothing in a narrow column.
  const common = tasks.reduce((start, task) => {
    while (!task[0].startsWith(start)) start = start.slice(0, start.slice(0, -1).lastIndexOf("/") + 1);
    return start;
  }, tasks[0][0].slice(0, tasks[0][0].lastIndexOf("/") + 1));
  let found = columns.id.map((_, row) => row), current = 0, opened = "";

  function element(kind, text, name) {
    const made = document.createElement(kind);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  function draw() {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - SPARE);
    const last = Math.min(found.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + SPARE);
    const made = document.createDocumentFragment();
    for (let index = first; index < last; index++) {
      const row = found[index], task = tasks[columns.task[row]], reward = columns.reward[row];
      const outcome = OUTCOMES[columns.outcome[row]];
      const line = element("div", undefined, index === current ? "row current" : "row");
      line.setAttribute("role", "row");
      line.setAttribute("aria-rowindex", index + 2);
      line.setAttribute("aria-selected", index === current);
      line.id = `row-${index}`;
      line.dataset.index = index;
      line.style.top = `${index * ROW}px`;
      const cells = [
        ["", ""], [task[0].slice(common.length), ""], [task[1], "wide"], [arms[columns.arm[row]], "wide"], [columns.trial[row], "wide"],
        [outcome, outcome], [reward === null ? "" : reward.toFixed(2), "wide"],
      ];
      cells.forEach(([text, name], column) => {
        const cell = element("span", text, name);
        cell.setAttribute("role", "gridcell");
        if (column === 0) {
          const link = element("a", columns.id[row]);
          link.href = `#${columns.id[row]}`;
          link.tabIndex = -1;
          cell.append(link);
        } else if (column === 1) cell.title = task[0];
        line.append(cell);
      });
      made.append(line);
    }
    space.replaceChildren(made);
    if (found.length) grid.setAttribute("aria-activedescendant", `row-${current}`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function filter() {
    const asked = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcome = at("outcome").value, kind = at("kind").value, arm = at("arm").value, split = at("split").value;
    const wanted = arm === "" ? -1 : arms.indexOf(arm);
    found = [];
    for (let row = 0; row < total; row++) {
      const task = tasks[columns.task[row]];
      if (outcome && columns.outcome[row] !== outcome) continue;
      if (kind && task[1] !== kind) continue;
      if (split && task[2] !== split) continue;
      if (wanted >= 0 && columns.arm[row] !== wanted) continue;
      if (!asked.every((word) => words[row].includes(word))) continue;
      found.push(row);
    }
    current = 0;
    body.scrollTop = 0;
    space.style.height = `${found.length * ROW}px`;
    grid.setAttribute("aria-rowcount", found.length + 1);
    at("count").textContent = `${found.length.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts`;
    draw();
  }

  function move(to) {
    if (!found.length) return;
    current = Math.max(0, Math.min(found.length - 1, to));
    if (current * ROW < body.scrollTop) body.scrollTop = current * ROW;
    if ((current + 1) * ROW > body.scrollTop + body.clientHeight) body.scrollTop = (current + 1) * ROW - body.clientHeight;
    draw();
  }

  function shard(number) {
    if (captrain.shards.has(number)) return Promise.resolve(captrain.shards.get(number));
    if (!captrain.waiting.has(number)) {
      captrain.waiting.set(number, new Promise((resolve, refuse) => {
        const script = document.createElement("script");
        script.src = `data/shard-${String(number).padStart(3, "0")}.js`;
        script.onload = () => (captrain.shards.has(number) ? resolve(captrain.shards.get(number)) : refuse());
        script.onerror = () => { captrain.waiting.delete(number); refuse(); };
        document.head.append(script);
      }));
    }
    return captrain.waiting.get(number);
  }

  function message(one, index, marks) {
    const line = element("li");
    line.append(element("span", `${index}: ${one.role}${one.name ? ` ${one.name}` : ""}`, "role"));
    for (const mark of marks.filter((each) => each.at === index)) {
      const who = mark.capability ? `${mark.capability} (LACKING in ${mark.runs} runs): ` : "";
      if (mark.selected) line.className = "failing";
      line.append(element("span", `${mark.selected ? "Fails here" : "Rejected candidate"}: ${who}${mark.why}`, mark.selected ? "why" : "note"));
    }
    if (one.text) line.append(element("pre", one.text));
    for (const call of one.calls) line.append(element("pre", call));
    return line;
  }

  function side(row, whole) {
    const one = whole.rollouts[columns.id[row]], outcome = OUTCOMES[columns.outcome[row]];
    const made = element("article");
    const head = element("h3", `${arms[columns.arm[row]]}: `);
    head.append(element("span", outcome, outcome));
    const reward = columns.reward[row];
    const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ");
    made.append(head, element("p", `Reward ${reward === null ? "undefined" : reward.toFixed(3)}${parts ? ` (${parts})` : ""}; ${one.tokens[0]} tokens read, ${one.tokens[1]} written; ` +
      `rollout ${columns.id[row]}, policy ${one.policy}${one.adapter ? `, adapter ${one.adapter}` : ""}${one.retries ? `, ${one.retries} retries` : ""}.`, "note"));
    if (one.error) made.append(element("p", `Infrastructure: ${one.error}`, "error"));
    if (outcome === "failed" && !one.marks.some((mark) => mark.selected)) {
      made.append(element("p", one.reference.length ? "No message is marked: the tool calls are the reference's, and no selected capability is labelled LACKING." : "No message is marked: there is no reference solution, and no selected capability is labelled LACKING.", "note"));
    }
    const list = element("ol", undefined, "messages");
    one.messages.forEach((each, index) => list.append(message(whole.messages[each], index, one.marks)));
    made.append(list);
    if (one.reference.length) {
      const more = element("details"), inner = element("ol", undefined, "messages");
      one.reference.forEach((each, index) => inner.append(message(whole.messages[each], index, [])));
      more.append(element("summary", "The reference solution"), inner);
      made.append(more);
    }
    return made;
  }

  function close() {
    panel.hidden = true;
    opened = "";
    history.replaceState(null, "", location.pathname);
    grid.focus();
  }

  async function open() {
    const id = decodeURIComponent(location.hash.slice(1));
    if (id === opened || id === "main") return;
    opened = id;
    panel.hidden = !id;
    if (!id) return;
    const row = place.get(id);
    if (row === undefined) {
      panel.replaceChildren(element("p", `There is no rollout ${id} in this report.`, "missing"));
      return;
    }
    if (found.includes(row)) move(found.indexOf(row));
    const mine = tasks[columns.task[row]];
    const peers = [];
    for (let each = 0; each < total; each++) {
      if (each !== row && columns.task[each] === columns.task[row] && columns.trial[each] === columns.trial[row]) peers.push(each);
    }
    const own = arms[columns.arm[row]], wanted = own === "base" ? mine[4] : "base";
    let beside = peers.find((each) => arms[columns.arm[each]] === wanted);
    try {
      const whole = await shard(columns.shard[row]);
      if (opened !== id) return;
      const pair = element("div", undefined, "pair");
      const head = element("h2", `${mine[0]}, trial ${columns.trial[row]}`);
      const back = element("button", "Back to the table");
      back.type = "button";
      back.addEventListener("click", close);
      const facts = element("p", `Kind ${mine[1] || "unnamed"}, ${mine[2]} split.` + (mine[4] ? ` TRACE routes this task to: ${mine[4]}.` : ""));
      panel.replaceChildren(head, back, facts);
      if (peers.length) {
        const label = element("label", "Beside it: "), choice = element("select");
        choice.id = "beside";
        choice.append(new Option("nothing", ""), ...peers.map((each) => new Option(`${arms[columns.arm[each]]} (${OUTCOMES[columns.outcome[each]]})`, each)));
        choice.value = beside === undefined ? "" : beside;
        choice.addEventListener("change", () => { beside = choice.value === "" ? undefined : Number(choice.value); fill(); });
        label.append(choice);
        panel.append(label);
      }
      panel.append(pair);
      // Base on the left, whichever of the two was opened. A task's rollouts lie in one shard.
      const fill = () => {
        const both = beside === undefined ? [row] : arms[columns.arm[beside]] === "base" ? [beside, row] : [row, beside];
        pair.style.gridTemplateColumns = both.length === 1 ? "1fr" : "";
        pair.replaceChildren(...both.map((each) => side(each, whole)));
      };
      fill();
      panel.focus({ preventScroll: true });
      panel.scrollIntoView();
      document.body.dataset.opened = id;
    } catch (fault) {
      if (fault) throw fault;
      panel.replaceChildren(element("p", "The messages of this rollout are not beside the page: copy the whole folder of the report.", "missing"));
    }
  }

  function options(id, values) {
    at(id).append(...[...new Set(values)].filter(Boolean).sort().map((value) => new Option(value, value)));
  }

  options("kind", tasks.map((task) => task[1]));
  options("split", tasks.map((task) => task[2]));
  options("arm", arms);
  at("filters").addEventListener("input", filter);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  body.addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  body.addEventListener("click", (event) => {
    const line = event.target.closest(".row");
    if (!line) return;
    current = Number(line.dataset.index);
    draw();
    location.hash = columns.id[found[current]];
  });
  grid.addEventListener("keydown", (event) => {
    const page = Math.floor(body.clientHeight / ROW);
    const moves = { ArrowDown: current + 1, ArrowUp: current - 1, PageDown: current + page, PageUp: current - page, Home: 0, End: found.length - 1 };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && found.length) location.hash = columns.id[found[current]];
    else return;
    event.preventDefault();
  });
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  addEventListener("hashchange", open);
  filter();
  document.body.dataset.ready = Math.round(performance.now());
  open();
}
