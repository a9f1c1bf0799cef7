// Any number of runs in one picture. Runs of a group, by seed or by a key of their run files, are one curve: their mean with
// its interval.
import { ask, follow } from "../api.js";
import { Chart } from "../chart/chart.js";
import { controls, Group } from "../chart/parts.js";
import { swatch } from "../chart/draw.js";
import { arrange, points, SECTIONS } from "../curves.js";
import { fill, h, perFrame, scrollable } from "../dom.js";
import { number } from "../format.js";
import { toPage, toRun } from "../router.js";
import { cards } from "../rows.js";
import { append } from "../run.js";
import { families, groupsByKey, joinCurves } from "../seeds.js";
import { statePill } from "../status.js";

export const title = "Compare";
const SEEDS = "all but the seed";

export async function render(root, _, params) {
  const names = [...new Set(params.getAll("run"))];
  if (!names.length) throw Object.assign(new Error("No run was chosen: tick some in the list of runs."), { status: 400 });
  const [listed, ...read] = await Promise.all([ask("runs"), ...names.map((run) => ask("metrics", { run }).catch(() => null))]);
  const configs = await Promise.all(names.map((run) => ask("config", { run }).catch(() => null)));
  const tables = new Map(names.map((name, at) => [name, new Map((configs[at]?.rows ?? []).map((row) => [row.key, JSON.stringify(row.value)]))]));
  const all = new Map(listed.runs.map((run) => [run.name, run]));
  const missing = names.filter((name) => !all.has(name));
  const chosen = names.filter((name) => all.has(name)).map((name) => all.get(name));
  const data = new Map(chosen.map((run) => [run.name, read[names.indexOf(run.name)] ?? { columns: {}, mark: "" }]));
  const group = new Group(params);
  const charts = new Map();
  const sections = new Map([...SECTIONS, "Other"].map((name) => {
    const grid = h("div", { class: "charts" });
    return [name, { grid, element: h("section", { class: "section", "aria-label": name }, h("h2", {}, name), grid) }];
  }));
  const flat = { grid: h("div", { class: "charts" }) };
  flat.element = h("details", { class: "section" }, h("summary", {}, "Constant, and the same in all of them"), flat.grid);
  sections.set("", flat);
  let filter = "";
  const keys = differingKeys(chosen.map(({ name }) => tables.get(name)));
  const by = h("select", { on: { change: () => { regroup(); draw(); } } },
    h("option", { value: SEEDS }, "all but the seed"), h("option", { value: "" }, "nothing: each run"),
    keys.filter((key) => key !== "seed").map((key) => h("option", { value: key }, key)));
  by.value = [...by.options].some(({ value }) => value === params.get("by")) ? params.get("by") : SEEDS;
  const legend = h("div", { class: "picked" });
  const explained = h("p", { class: "faint" });
  const bar = controls(group, (text) => { filter = text; sift(); });
  if (chosen.length > 1) bar.append(h("label", { title: "Runs with the same value are one curve" }, "Group by", by));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, `Compare ${chosen.length} runs`),
      chosen.length === 2 ? h("a", { href: toPage("diff", { a: chosen[0].name, b: chosen[1].name }) }, "Differences") : null,
      chosen.length === 2 ? h("a", { href: toPage("ab", pair(chosen)) }, "Which is better?") : null),
    missing.length ? h("div", { class: "notice warn" }, `Not in this folder any more: ${missing.join(", ")}`) : null,
    legend, explained, differences(chosen, tables, keys), h("div", { class: "sticky" }, bar), [...sections.values()].map(({ element }) => element)));

  function sift() {
    for (const { chart, words } of charts.values()) chart.element.hidden = Boolean(filter) && !words.includes(filter);
    for (const { grid, element } of sections.values()) element.hidden = ![...grid.children].some((child) => !child.hidden);
  }

  function grouped() {
    if (!by.value) return chosen.map((run) => ({ label: run.name, runs: [run] }));
    return by.value === SEEDS ? families(chosen) : groupsByKey(chosen, tables, by.value);
  }

  /** The choice stands in the address. */
  function regroup() {
    const query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    if (by.value === SEEDS) query.delete("by");
    else query.set("by", by.value);
    history.replaceState(null, "", toPage("compare", query));
  }

  function draw() {
    const groups = grouped();
    fill(legend, groups.map((one, index) => h("span", { class: "row" },
      swatch(signOf(index)),
      one.runs.length > 1 ? h("b", { title: one.runs.map(({ name }) => name).join(", ") }, `${one.label}, ${one.runs.length} ${by.value === SEEDS ? "seeds" : "runs"}`)
        : h("a", { href: toRun(one.runs[0].name), title: one.runs[0].name }, one.label),
      one.runs.length === 1 ? statePill(one.runs[0].state, one.runs[0].health) : null)));
    const most = Math.max(0, ...groups.map((one) => one.runs.length));
    fill(explained, most > 2 ? "Curves are means over the runs of a group, bands the 95 % interval of the mean (Student's t); of two runs, from the lower to the higher."
      : most > 1 ? "Curves are means of two runs, bands go from the lower to the higher." : "");
    const places = chosen.flatMap((run) => points(data.get(run.name).columns, group.axis, group.axis).xs);
    group.span = places.length > 1 ? [places.reduce((a, b) => Math.min(a, b)), places.reduce((a, b) => Math.max(a, b))] : null;
    const metricNames = new Set(chosen.flatMap((run) => Object.keys(data.get(run.name).columns)));
    for (const { chart, curves } of arrange(metricNames)) {
      for (const curve of curves) {
        const series = groups.flatMap((one, index) => {
          const each = one.runs.map((run) => points(data.get(run.name).columns, curve.name, group.axis)).filter(({ xs }) => xs.length);
          return each.length ? [{ label: one.label, ...signOf(index), ...joinCurves(each, group.axis) }] : [];
        });
        if (series.length) show(chart, curve, curves.length, series);
      }
    }
    sift();
  }

  function show(spec, curve, count, series) {
    if (!charts.has(curve.name)) {
      const title = count > 1 ? `${spec.title.split(/,| by /)[0]}: ${curve.label}` : spec.title;
      const chart = new Chart(group, { ...spec, title, stacked: false, broad: false, lead: spec.lead && count === 1 });
      charts.set(curve.name, { chart, words: `${title} ${curve.name} ${spec.section}`.toLowerCase() });
    }
    const { chart } = charts.get(curve.name);
    chart.update(series);
    const first = series[0].ys[0];
    const constant = series.every(({ ys }) => ys.every((value) => Math.abs(value - first) <= 1e-9 * Math.abs(first)));
    const { grid } = sections.get(constant ? "" : spec.section);
    if (chart.element.parentElement !== grid) grid.append(chart.element);
  }

  draw();
  const redraw = perFrame(draw);
  group.addEventListener("axis", redraw);
  addEventListener("theme", redraw);
  const stop = follow(() => ({}), {
    runs: async ({ changed }) => {
      for (const run of changed.filter(({ name }) => data.has(name))) {
        const mine = data.get(run.name);
        const more = await ask("metrics", { run: run.name, mark: mine.mark }).catch(() => null);
        if (!more || more.mark === mine.mark) continue;
        if (more.fresh) mine.columns = more.columns;
        else append(mine.columns, more.columns);
        mine.mark = more.mark;
        Object.assign(chosen.find(({ name }) => name === run.name), run);
        redraw();
      }
    },
  });
  return () => {
    stop();
    removeEventListener("theme", redraw);
    for (const { chart } of charts.values()) chart.close();
  };
}

/** A run's colour and dash, the same in all charts: from the ninth on the dash changes. */
function signOf(index) {
  return { colour: index % 8, dash: Math.floor(index / 8) };
}

/** Two runs in the order of their names, as `paceline ab` takes them. */
function pair(runs) {
  const [a, b] = runs.map(({ name }) => name).sort();
  return { a, b };
}

function differingKeys(tables) {
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((key) => key !== "name" && key !== "runs");
  return keys.filter((key) => new Set(tables.map((table) => table.get(key))).size > 1);
}

/** What the run files of these runs disagree about. */
function differences(runs, tables, differing) {
  if (runs.length < 2) return null;
  if (!differing.length) return h("p", { class: "soft" }, "Their run files are the same, but for the name.");
  const shown = (text) => (text === undefined ? "–" : text.replace(/^"|"$/g, ""));
  return h("details", { class: "section", open: differing.length <= 8 },
    h("summary", {}, "Settings that differ", h("span", { class: "faint" }, number(differing.length) + (differing.length === 1 ? " key" : " keys"))),
    scrollable("Keys in which the runs differ", cards(h("table", { class: "list differs" },
      h("caption", { class: "unseen" }, "Keys in which the runs differ"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Key"), runs.map((run) => h("th", { scope: "col" }, run.name)))),
      h("tbody", {}, differing.map((key) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key),
        runs.map((run) => h("td", { class: "mono" }, shown(tables.get(run.name).get(key)))))))))));
}
