// The resolved run file: every key, what it means, and what differs from the defaults.
import { ask } from "../api.js";
import { fill, h, memory, prose, scrollable } from "../dom.js";
import { amount } from "../format.js";
import { cards } from "../rows.js";

export const title = "Config";

export async function render(root, run) {
  const data = await ask("config", { run: run.name });
  const state = { search: "", only: memory.get("only changed", false), raw: false };
  const changed = data.rows.filter((row) => row.changed).length;
  const search = h("input", {
    type: "search", placeholder: "Find a key  /", "aria-label": "Find a key", "aria-keyshortcuts": "/", data: { search: "" },
    on: { input: () => { state.search = search.value.toLowerCase(); draw(); } },
  });
  const only = h("input", { type: "checkbox", on: { change: () => { state.only = only.checked; memory.set("only changed", state.only); draw(); } } });
  only.checked = state.only;
  const raw = h("button", { type: "button", class: "quiet", "aria-pressed": "false", on: { click: () => { state.raw = !state.raw; draw(); } } }, "as file");
  const copy = h("button", { type: "button", class: "quiet", on: { click: () => copyText(copy, data.text) } }, "copy");
  const place = h("div");
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, "Config"), h("span", { class: "soft" }, `${amount(changed, "key")} of ${data.rows.length} differ from the defaults`)),
    data.problems.length ? h("div", { class: "notice warn" }, h("ul", {}, data.problems.map((problem) => h("li", {}, problem)))) : null,
    h("div", { class: "controls" }, search, h("label", {}, only, "only what differs"), h("span", { class: "grow" }), raw, copy),
    place));

  function draw() {
    raw.setAttribute("aria-pressed", String(state.raw));
    if (!data.rows.length && !data.text) {
      fill(place, h("div", { class: "empty" }, h("h2", {}, "No run file"), h("p", {}, "config.toml is missing from the run's directory.")));
    } else if (state.raw || !data.rows.length) {
      fill(place, h("pre", { class: "raw", tabindex: 0 }, data.text));
    } else {
      const shown = data.rows.filter((row) => (!state.only || row.changed)
        && [row.key, row.section, text(row.value), row.help].some((one) => one.toLowerCase().includes(state.search)));
      fill(place, shown.length ? table(shown) : h("div", { class: "empty" }, h("h2", {}, "No key matches")));
    }
  }
  draw();
}

function table(rows) {
  const lines = [];
  let section = null;
  for (const row of rows) {
    if (row.section !== section) {
      section = row.section;
      lines.push(h("tr", { class: "part" }, h("th", { colspan: 4, scope: "rowgroup" }, section || "run")));
    }
    lines.push(h("tr", { class: row.changed ? "changed" : null },
      h("th", { scope: "row", class: "mono", title: row.key }, row.name, row.changed && h("span", { class: "unseen" }, " (differs from its default)")),
      h("td", { class: "value mono" }, text(row.value)),
      h("td", { class: "was mono" }, row.changed ? (row.default === null || row.default === undefined ? "not set" : text(row.default)) : ""),
      h("td", { class: "help" }, row.known ? prose(row.help) : "this version does not know the key")));
  }
  return scrollable("The run file, key by key", cards(h("table", { class: "list config" },
    h("caption", { class: "unseen" }, "The run file, key by key"),
    h("thead", {}, h("tr", {}, ["Key", "Value", "Default", "Meaning"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, lines))));
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

async function copyText(button, content) {
  try {
    await navigator.clipboard.writeText(content);
    button.textContent = "copied";
  } catch {
    button.textContent = "not allowed here";
  }
  setTimeout(() => (button.textContent = "copy"), 2000);
}
