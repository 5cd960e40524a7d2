"use strict";
/* The script of the report: the selection rule, its sliders, the table of rollouts, and the navigation. */

/* The rule of captrain.capabilities.selection_rule, applied to the per-run numbers of a selection. An undefined gap or coverage
   is null. Returns the candidates in rank order: id, retained runs, needed runs, shortfall, selected, and proof: true
   if only a proof selects it. */
function captrainSelect(report, limits) {
  const candidates = report.candidates;
  const runs = candidates.length ? candidates[0].per_run.length : 0;
  const accounts = candidates.map((one) => {
    let retained = 0, speaking = 0;
    one.per_run.forEach((each) => {
      if (each.gap !== null && each.coverage !== null && each.gap >= limits.delta && each.coverage >= limits.coverage) retained++;
      // A run without a coverage (the candidate was not proposed, or no failed rollout was drawn) counts against it.
      if (each.gap !== null || each.coverage === null) speaking++;
    });
    // A run with an undefined gap does not vote.
    const needed = Math.ceil(limits.agreement * speaking / runs) || limits.agreement;
    let shortfall = "";
    if (retained < needed) shortfall = `retained in ${retained} of ${runs} runs, ${needed} needed`;
    else if (one.gap_low === null) shortfall = "the gap is undefined in most resamples";
    else if (one.gap_low <= limits.floor) shortfall = `lower bound of the gap ${one.gap_low.toFixed(3)} is not above ${limits.floor}`;
    const proof = limits.proof !== undefined && shortfall !== "" && (one.proven_low ?? -1) >= limits.proof;
    const gaps = one.per_run.filter((each) => each.gap !== null).map((each) => Math.round(each.gap * 1e6));
    const scores = {
      product: one.gap === null || one.coverage === null ? null : one.gap * one.coverage,
      gap: one.gap,
      mean_gap: gaps.length ? gaps.reduce((sum, gap) => sum + gap, 0) / (1e6 * gaps.length) : null,
      coverage: one.coverage,
    };
    const score = proof ? one.proven : scores[limits.ranking || "product"] ?? -Infinity;
    return { id: one.id, name: one.name, gap: one.gap, coverage: one.coverage, retained, runs, needed, shortfall, proof, score };
  });
  const order = (first, second) => (first < second ? -1 : first > second ? 1 : 0);
  accounts.sort((first, second) => order(first.shortfall !== "", second.shortfall !== "") || order(second.proof, first.proof) || order(second.score, first.score) || order(first.id, second.id));
  accounts.forEach((one, at) => { one.selected = (one.shortfall === "" || one.proof) && at < limits.count; });
  return accounts;
}

/* Sliders for the thresholds. The address holds their values, so that you can share a choice. Returns the function
   that sets the sliders from the address. */
function captrainSliders() {
  const report = JSON.parse(document.getElementById("selection").textContent);
  const names = ["delta", "coverage", "agreement"];
  const inputs = Object.fromEntries(names.map((name) => [name, document.getElementById(name)]));
  const runs = report.candidates.length ? report.candidates[0].per_run.length : report.thresholds.agreement;
  inputs.agreement.max = Math.max(runs, report.thresholds.agreement);

  function set(values) {
    for (const name of names) inputs[name].value = values[name];
    draw();
  }

  function given() {
    const asked = new URLSearchParams(location.hash.split("?")[1]);
    const values = { ...report.thresholds };
    for (const name of names) {
      const value = asked.get(name);
      if (value !== null && value !== "" && Number.isFinite(Number(value))) values[name] = Number(value);
    }
    return values;
  }

  function cell(row, text, kind) {
    const made = document.createElement(kind === "th" ? "th" : "td");
    if (kind === "th") made.scope = "row"; else if (kind) made.className = kind;
    made.textContent = text;
    row.append(made);
    return made;
  }

  const called = new Map(report.candidates.map((one) => [one.id, one.name]));
  const named = (ids) => ids.map((id) => called.get(id)).join(", ") || "none";
  const number = (value) => (value === null ? "undefined" : value.toFixed(3));

  function draw() {
    const limits = { ...report.thresholds };
    for (const name of names) {
      limits[name] = Number(inputs[name].value);
      document.getElementById(`${name}-now`).textContent = name === "agreement" ? `${limits[name]} of ${runs}` : limits[name].toFixed(2);
    }
    const accounts = captrainSelect(report, limits);
    const chosen = accounts.filter((one) => one.selected).map((one) => one.id);
    const before = report.candidates.filter((one) => one.selected).map((one) => one.id);
    const body = document.querySelector(".candidates tbody");
    body.replaceChildren();
    for (const one of accounts) {
      const row = document.createElement("tr");
      row.className = one.selected ? "head" : "quiet";
      const head = cell(row, "", "th");
      const link = document.createElement("a");
      link.href = `#capability-${one.id}`;
      link.textContent = one.name;
      head.append(link);
      cell(row, one.selected ? (one.proof ? "selected by proof" : "selected") : one.proof ? `proven, but ${limits.count} are kept` : one.shortfall || `retained, but ${limits.count} are kept`, one.selected ? "passed reading" : "reading");
      cell(row, `${one.retained} of ${one.runs}`, "n");
      cell(row, number(one.gap), "n");
      cell(row, number(one.coverage), "n");
      body.append(row);
    }
    const same = chosen.length === before.length && chosen.every((id, at) => id === before[at]);
    document.getElementById("said").textContent = `${chosen.length} selected: ${named(chosen)}. ` + (same ? "The same as in this run." : `This run selected ${named(before)}.`);
    document.body.dataset.selected = chosen.join(" ");
  }

  for (const name of names) {
    inputs[name].addEventListener("input", draw);
    inputs[name].addEventListener("change", () => {
      history.replaceState(null, "", `#thresholds?${names.map((one) => `${one}=${inputs[one].value}`).join("&")}`);
    });
  }
  document.getElementById("limits").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset").addEventListener("click", () => {
    history.replaceState(null, "", "#thresholds");
    set(report.thresholds);
  });
  return () => set(given());
}

/* The table of rollouts, loaded when it is first shown. Only the visible rows exist. The address names the open rollout,
   and its messages come from a shard that is loaded once. All text is set as text. */
const captrain = { shards: new Map(), waiting: new Map(), open: () => {} };

function captrainShard(number, data) {
  captrain.shards.set(number, data);
}

function captrainLoad(name) {
  if (!captrain.waiting.has(name)) {
    captrain.waiting.set(name, new Promise((resolve, refuse) => {
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onload = resolve;
      script.onerror = () => { captrain.waiting.delete(name); refuse(); };
      document.head.append(script);
    }));
  }
  return captrain.waiting.get(name);
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
  // Cut off the common beginning of all task ids: the column is narrow.
  const common = tasks.reduce((start, task) => {
    while (!task[0].startsWith(start)) start = start.slice(0, start.slice(0, -1).lastIndexOf("/") + 1);
    return start;
  }, tasks[0][0].slice(0, tasks[0][0].lastIndexOf("/") + 1));
  let found = columns.id.map((_, row) => row), current = 0, opened = "";

  const address = (row) => `#rollout/${encodeURIComponent(columns.id[row])}`;

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
          link.href = address(row);
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
    const outcome = at("outcome").value, kind = at("kind").value, arm = at("arm").value, split = at("split").value, lacks = at("lacks").value;
    const wanted = arm === "" ? -1 : arms.indexOf(arm);
    found = [];
    for (let row = 0; row < total; row++) {
      const task = tasks[columns.task[row]];
      if (outcome && columns.outcome[row] !== outcome) continue;
      if (kind && task[1] !== kind) continue;
      if (split && task[2] !== split) continue;
      if (lacks && !columns.lacks[row].split(" ").includes(lacks)) continue;
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

  async function shard(number) {
    await captrainLoad(`shard-${String(number).padStart(3, "0")}`);
    return captrain.shards.get(number) ?? Promise.reject();
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

  // The address holds the filters, so that you can share them.
  const FILTERS = ["search", "outcome", "split", "kind", "arm", "lacks"];

  function chosen() {
    const given = FILTERS.filter((name) => at(name).value).map((name) => `${name}=${encodeURIComponent(at(name).value)}`);
    return "#rollouts" + (given.length ? `?${given.join("&")}` : "");
  }

  function restore() {
    const asked = new URLSearchParams(location.hash.split("?")[1]);
    for (const name of FILTERS) at(name).value = asked.get(name) ?? "";
    filter();
  }

  function close() {
    panel.hidden = true;
    opened = "";
    history.replaceState(null, "", chosen());
    grid.focus();
  }

  async function open() {
    const id = location.hash.startsWith("#rollout/") ? decodeURIComponent(location.hash.slice(9)) : "";
    if (!id && location.hash.split("?")[0] === "#rollouts" && location.hash !== chosen()) restore();
    draw();
    if (id === opened) return;
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
      // The base is always on the left. All rollouts of a task are in one shard.
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
  at("filters").addEventListener("input", () => {
    filter();
    if (!opened) history.replaceState(null, "", chosen());
  });
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  body.addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  body.addEventListener("click", (event) => {
    const line = event.target.closest(".row");
    if (!line) return;
    current = Number(line.dataset.index);
    draw();
    location.hash = address(found[current]);
  });
  grid.addEventListener("keydown", (event) => {
    const page = Math.floor(body.clientHeight / ROW);
    const moves = { ArrowDown: current + 1, ArrowUp: current - 1, PageDown: current + page, PageUp: current - page, Home: 0, End: found.length - 1 };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && found.length) location.hash = address(found[current]);
    else return;
    event.preventDefault();
  });
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  captrain.open = open;
  filter();
  document.body.dataset.ready = Math.round(performance.now());
  open();
}

/* Show one view at a time: the one that the address after # names or that contains the named element. Without scripts
   all views are shown. `#rollout/ID` is a rollout, `#thresholds?delta=...` a choice of thresholds. */
globalThis.addEventListener?.("DOMContentLoaded", () => {
  const views = [...document.querySelectorAll(".view")];
  const slide = document.getElementById("selection") ? captrainSliders() : () => {};

  function show(event) {
    const name = location.hash.slice(1).split(/[/?]/)[0];
    const target = document.getElementById(name === "rollout" ? "rollouts" : name) ?? views[0];
    const view = target.closest(".view") ?? (event ? null : views[0]);
    if (!view) return; // the skip link
    const other = view.hidden || !event;
    for (const each of views) each.hidden = each !== view;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${view.dataset.of ?? view.id}`) {
        link.setAttribute("aria-current", view.dataset.of ? "true" : "page");
        link.scrollIntoView({ block: "nearest" });
      } else link.removeAttribute("aria-current");
    }
    document.title = `${view.dataset.title} - captrain`;
    if (event && other) view.focus({ preventScroll: true });
    if (target !== view) target.scrollIntoView();
    else if (other) scrollTo(0, 0);
    if (view.id === "thresholds") slide();
    if (view.id !== "rollouts" || !document.getElementById("grid")) return;
    captrainLoad("rows").then(() => captrain.open(), () => {
      document.getElementById("count").textContent = "The rollouts are not beside the page: copy the whole folder of the report.";
    });
  }

  addEventListener("hashchange", show);
  show();
});
