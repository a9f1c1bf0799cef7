// All runs: search, sort, tick to compare.
import { ask, follow } from "../api.js";
import { spark } from "../chart/draw.js";
import { announce, fill, h, patchRows } from "../dom.js";
import { age, amount, moment, number, seconds, whole } from "../format.js";
import { replaceAddress, toPage, toRun } from "../router.js";
import { named, walkable } from "../rows.js";
import { healthPill, statePill } from "../status.js";
import { changeText, delta, since } from "../vitals.js";

export const title = "Runs";

const ticked = new Set(); // Kept while one looks at a run and comes back.
const COLUMNS = [
  ["name", "Run", (run) => run.name],
  ["state", "State", (run) => ["running", "starting", "failed", "crashed", "interrupted", "finished"].indexOf(run.state)],
  ["health", "Health", (run) => run.health.verdict],
  ["step", "Step", (run) => run.step, "right"],
  ["reward", "Reward", (run) => run.reward?.last ?? -Infinity, "right"],
  ["spark", "Progress", null],
  ["eval", "Held-out", (run) => run.eval?.last ?? -Infinity, "right"],
  ["seen", "Last update", (run) => run.seen ?? 0, "right"],
];

export async function render(root, _, params) {
  const data = await ask("runs");
  const runs = new Map(data.runs.map((run) => [run.name, run]));
  const sort = params.get("sort") ?? "-seen";
  const isColumn = COLUMNS.some(([key, , value]) => value && key === sort.replace("-", ""));
  const state = { search: params.get("search") ?? "", sort: isColumn ? sort.replace("-", "") : "seen", down: !isColumn || sort.startsWith("-") };
  const search = h("input", {
    type: "search", placeholder: "Search names, tags, states  /", "aria-label": "Search runs", "aria-keyshortcuts": "/", data: { search: "" },
    size: 34, value: state.search, on: { input: () => look(search.value) },
  });
  const compare = h("button", { type: "button", class: "strong", on: { click: () => go() } });
  const part = h("button", { type: "button", title: "Settings and curves in which the two runs differ", on: { click: () => asked("diff") } }, "Differences");
  const clear = h("button", { type: "button", class: "quiet", on: { click: () => { ticked.clear(); draw(); } } }, "Untick all");
  const counted = h("span", { class: "soft" });
  const body = h("tbody");
  const headings = COLUMNS.map(([key, label, value, side]) => h("th", { scope: "col", class: side },
    value ? h("button", { type: "button", on: { click: () => sortBy(key) } }, label) : label));
  const list = h("div", { class: "scroll" }, h("table", { class: "list runs cards" },
    h("caption", { class: "unseen" }, "Runs. Arrow keys go from row to row, Space ticks one to compare, Enter opens it."),
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "pick" }, h("span", { class: "unseen" }, "Compare")), headings)),
    body));
  const empty = h("div");
  fill(root,
    h("div", { class: "head" }, h("h1", {}, "Runs"), h("span", { class: "faint mono" }, data.folder)),
    h("div", { class: "stack" },
      h("div", { class: "row" }, search, counted, h("span", { class: "grow" }), clear, part, compare),
      list, empty));
  const keepFocus = walkable(body, { open: (row) => (location.hash = toRun(row.dataset.key)), tick: (row) => tick(row.dataset.key) });

  function look(text) {
    state.search = text;
    search.value = text;
    keep();
    draw();
    announce(`${amount(found().length, "run")} found`, true);
  }

  function sortBy(key) {
    state.down = state.sort === key ? !state.down : !["name", "state", "health"].includes(key);
    state.sort = key;
    keep();
    draw();
  }

  /** Search and order stand in the address, so that Back finds the table as it was. */
  function keep() {
    const query = new URLSearchParams(state.search ? { search: state.search } : {});
    const order = `${state.down ? "-" : ""}${state.sort}`;
    if (order !== "-seen") query.set("sort", order);
    replaceAddress(query.size ? toPage("runs", query) : "#/");
  }

  function tick(name) {
    if (!ticked.delete(name)) ticked.add(name);
    draw();
  }

  function go() {
    location.hash = toPage("compare", new URLSearchParams([...ticked].filter((name) => runs.has(name)).map((name) => ["run", name])));
  }

  function asked(page) {
    const [a, b] = [...ticked].filter((name) => runs.has(name));
    location.hash = toPage(page, { a, b });
  }

  function found() {
    const wanted = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const value = COLUMNS.find(([key]) => key === state.sort)[2];
    const sign = state.down ? -1 : 1;
    return [...runs.values()]
      .filter((run) => wanted.every((word) => [run.name, run.state, run.health.verdict, ...run.tags].some((text) => text.toLowerCase().includes(word))))
      .sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return (x < y ? -1 : x > y ? 1 : 0) * sign || (a.name < b.name ? -1 : 1);
      });
  }

  function draw() {
    const shown = found();
    const refocus = keepFocus();
    const count = [...ticked].filter((name) => runs.has(name)).length;
    compare.disabled = count < 2;
    compare.textContent = count < 2 ? "Tick two runs to compare" : `Compare ${count} runs`;
    clear.hidden = !count;
    part.hidden = count !== 2;
    counted.textContent = shown.length === runs.size ? amount(runs.size, "run") : `${shown.length} of ${amount(runs.size, "run")}`;
    COLUMNS.forEach(([key], index) => {
      if (key === state.sort) headings[index].setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else headings[index].removeAttribute("aria-sort");
      const button = headings[index].querySelector("button");
      if (button) button.textContent = COLUMNS[index][1] + (key === state.sort ? (state.down ? " ↓" : " ↑") : "");
    });
    patchRows(body, shown.map((run) => rowOf(run, tick, look)));
    for (const box of body.querySelectorAll("input")) box.checked = ticked.has(box.closest("tr").dataset.key);
    list.hidden = !shown.length;
    search.hidden = !runs.size;
    compare.hidden = runs.size < 2;
    fill(empty, runs.size === 0 ? noRuns(data.folder) : shown.length === 0 ? noMatch(() => look("")) : null);
    for (const canvas of body.querySelectorAll("canvas")) spark(canvas, runs.get(canvas.dataset.run).spark);
    refocus();
  }

  draw();
  const redraw = () => draw();
  addEventListener("theme", redraw);
  const clock = setInterval(() => {
    for (const cell of body.querySelectorAll("[data-seen]")) cell.textContent = age(Number(cell.dataset.seen));
  }, 5000);
  const stop = follow(() => ({}), {
    runs: ({ changed, gone }) => {
      for (const run of changed) runs.set(run.name, run);
      for (const name of gone) runs.delete(name);
      draw();
    },
  });
  return () => {
    stop();
    clearInterval(clock);
    removeEventListener("theme", redraw);
  };
}

function rowOf(run, tick, look) {
  const box = h("input", { type: "checkbox", tabindex: -1, "aria-label": `Compare ${run.name}`, on: { change: () => tick(run.name) } });
  const trouble = run.message || run.problems[0];
  return named(h("tr", { data: { key: run.name }, tabindex: -1, class: ticked.has(run.name) ? "ticked" : null },
    h("td", { class: "pick" }, box),
    h("td", { class: "name" }, h("a", { href: toRun(run.name), tabindex: -1 }, run.name),
      trouble && h("div", { class: run.message && run.state === "failed" ? "trouble" : "trouble warn", title: trouble }, trouble),
      h("div", { class: "tags" }, run.tags.map((tag) =>
        h("button", { type: "button", class: "tag", tabindex: -1, title: `Show runs with ${tag}`, on: { click: () => look(tag) } }, tag)))),
    h("td", {}, statePill(run.state, run.health)),
    h("td", {}, healthPill(run.health)),
    h("td", { class: "right" }, progress(run)),
    h("td", { class: "right" }, trend(run.reward)),
    h("td", {}, run.spark.length > 1 ? h("canvas", { class: "spark", "aria-hidden": "true", data: { run: run.name } }) : h("span", { class: "faint" }, "–")),
    h("td", { class: "right" }, trend(run.eval)),
    h("td", { class: "right", title: duration(run) }, h("span", { data: { seen: run.seen ?? "" } }, age(run.seen)))), ["", ...COLUMNS.map(([, label]) => label)]);
}

function progress({ step, total_steps: total }) {
  if (!total) return whole(step);
  return [
    h("span", { class: "progress", "aria-hidden": "true", vars: { "--done": `${Math.min(100, (100 * step) / total)}%` } }, h("i")),
    whole(step), h("span", { class: "faint" }, ` / ${whole(total)}`)];
}

function trend(ends) {
  if (!ends) return h("span", { class: "faint" }, "–");
  return h("div", { title: since(ends) }, h("b", {}, number(ends.last)), delta(changeText(ends)), h("div", { class: "window" }, ends.last_steps));
}

function duration(run) {
  const end = run.ended ?? run.seen;
  return `began ${moment(run.began)}${run.began && end ? `, took ${seconds(end - run.began)}` : ""}`;
}

function noRuns(folder) {
  return h("div", { class: "empty" }, h("h2", {}, "No runs yet"),
    h("p", {}, "This page shows a run as soon as it begins in ", h("span", { class: "mono" }, folder), "."),
    h("code", {}, "paceline train examples/quickstart.toml"));
}

function noMatch(clear) {
  return h("div", { class: "empty" }, h("h2", {}, "No run matches"), h("button", { type: "button", on: { click: clear } }, "Show all runs"));
}
