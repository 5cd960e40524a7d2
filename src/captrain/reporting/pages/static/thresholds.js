"use strict";
/* Sliders over selection.js; the thresholds are kept in the address, so that a choice can be handed on. */
(() => {
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
    const asked = new URLSearchParams(location.hash.slice(1));
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
    const body = document.getElementById("candidates");
    body.replaceChildren();
    for (const one of accounts) {
      const row = document.createElement("tr");
      row.className = one.selected ? "head" : "quiet";
      const head = cell(row, "", "th");
      const link = document.createElement("a");
      link.href = `capability-${encodeURIComponent(one.id)}.html`;
      link.textContent = one.name;
      head.append(link);
      cell(row, one.selected ? "selected" : one.shortfall || `retained, but ${limits.count} are kept`, one.selected ? "passed reading" : "reading");
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
      history.replaceState(null, "", `#${names.map((one) => `${one}=${inputs[one].value}`).join("&")}`);
    });
  }
  document.getElementById("thresholds").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("reset").addEventListener("click", () => {
    history.replaceState(null, "", location.pathname);
    set(report.thresholds);
  });
  addEventListener("hashchange", () => set(given()));
  set(given());
})();
