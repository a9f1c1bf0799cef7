// Several runs in one picture. Runs that differ only in their seed are one curve: their mean, and a band from the lowest to
// the highest.
import { ask, follow } from "../api.js";
import { Chart } from "../chart/chart.js";
import { controls, Group } from "../chart/parts.js";
import { seriesColour } from "../chart/draw.js";
import { arrange, points, SECTIONS } from "../curves.js";
import { fill, h, memory, perFrame } from "../dom.js";
import { number } from "../format.js";
import { toPage, toRun } from "../router.js";
import { append } from "../run.js";
import { families, joinCurves } from "../seeds.js";
import { statePill } from "../status.js";

export const title = "Compare";

export async function render(root, _, params) {
  const names = [...new Set(params.getAll("run"))];
  if (!names.length) throw Object.assign(new Error("No run was chosen: tick some in the list of runs."), { status: 400 });
  const [listed, ...read] = await Promise.all([ask("runs"), ...names.map((run) => ask("metrics", { run }).catch(() => null))]);
  const all = new Map(listed.runs.map((run) => [run.name, run]));
  const missing = names.filter((name) => !all.has(name));
  const chosen = names.filter((name) => all.has(name)).map((name) => all.get(name));
  const told = new Map(chosen.map((run) => [run.name, read[names.indexOf(run.name)] ?? { columns: {}, mark: "" }]));
  const group = new Group();
  const charts = new Map();
  const sections = new Map([...SECTIONS, "Other"].map((name) => {
    const grid = h("div", { class: "charts" });
    return [name, { grid, element: h("section", { class: "section", "aria-label": name }, h("h2", {}, name), grid) }];
  }));
  const flat = { grid: h("div", { class: "charts" }) };
  flat.element = h("details", { class: "section" }, h("summary", {}, "Constant, and the same in all of them"), flat.grid);
  sections.set("", flat);
  let bands = memory.get("bands", true);
  let filter = "";
  const split = h("input", { type: "checkbox", on: { change: () => { bands = split.checked; memory.set("bands", bands); draw(); } } });
  split.checked = bands;
  const legend = h("div", { class: "picked" });
  const differing = h("div");
  Promise.all(chosen.map((run) => ask("config", { run: run.name })))
    .then((configs) => fill(differing, differences(chosen, configs)))
    .catch((error) => fill(differing, h("p", { class: "soft" }, `Their run files cannot be compared: ${error.message}`)));
  const bar = controls(group, (text) => { filter = text; sift(); });
  if (families(chosen).some((one) => one.runs.length > 1)) bar.append(h("label", {}, split, "seeds as one band"));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, `Compare ${chosen.length} runs`),
      chosen.length === 2 ? h("a", { href: toPage("diff", { a: chosen[0].name, b: chosen[1].name }) }, "Where do they part?") : null,
      chosen.length === 2 ? h("a", { href: toPage("ab", pair(chosen)) }, "Which is better?") : null),
    missing.length ? h("div", { class: "notice warn" }, `Not in this folder any more: ${missing.join(", ")}`) : null,
    legend, differing, h("div", { class: "sticky" }, bar), [...sections.values()].map(({ element }) => element)));

  function sift() {
    for (const { chart, words } of charts.values()) chart.element.hidden = Boolean(filter) && !words.includes(filter);
    for (const { grid, element } of sections.values()) element.hidden = ![...grid.children].some((child) => !child.hidden);
  }

  function draw() {
    const groups = bands ? families(chosen) : chosen.map((run) => ({ label: run.name, runs: [run] }));
    fill(legend, groups.map((one, index) => h("span", { class: "row" },
      h("span", { class: "swatch block", vars: { "--swatch": seriesColour(index) } }),
      one.runs.length > 1 ? h("b", {}, `${one.label}, ${one.runs.length} seeds`) : h("a", { href: toRun(one.runs[0].name) }, one.label),
      one.runs.length === 1 ? statePill(one.runs[0].state, one.runs[0].health) : null)));
    const places = chosen.flatMap((run) => points(told.get(run.name).columns, group.axis, group.axis).xs);
    group.span = places.length > 1 ? [places.reduce((a, b) => Math.min(a, b)), places.reduce((a, b) => Math.max(a, b))] : null;
    const metricNames = new Set(chosen.flatMap((run) => Object.keys(told.get(run.name).columns)));
    for (const { chart, curves } of arrange(metricNames)) {
      for (const curve of curves) {
        const series = groups.flatMap((one, index) => {
          const each = one.runs.map((run) => points(told.get(run.name).columns, curve.name, group.axis)).filter(({ xs }) => xs.length);
          return each.length ? [{ label: one.label, colour: index, ...joinCurves(each, group.axis) }] : [];
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
      for (const run of changed.filter(({ name }) => told.has(name))) {
        const mine = told.get(run.name);
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

/** Two runs as a and b, in the order of their names: `paceline ab` calls them so. */
function pair(runs) {
  const [a, b] = runs.map(({ name }) => name).sort();
  return { a, b };
}

/** What the run files of these runs disagree about. */
function differences(runs, configs) {
  const tables = configs.map(({ rows }) => new Map(rows.map((row) => [row.key, JSON.stringify(row.value)])));
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((key) => key !== "name" && key !== "runs");
  const differing = keys.filter((key) => new Set(tables.map((table) => table.get(key))).size > 1);
  if (runs.length < 2) return null;
  if (!differing.length) return h("p", { class: "soft" }, "Their run files are the same, but for the name.");
  const shown = (text) => (text === undefined ? "–" : text.replace(/^"|"$/g, ""));
  return h("details", { class: "section", open: differing.length <= 8 },
    h("summary", {}, "Where their run files differ", h("span", { class: "faint" }, number(differing.length) + (differing.length === 1 ? " key" : " keys"))),
    h("div", { class: "scroll" }, h("table", { class: "list differs" },
      h("caption", { class: "unseen" }, "Keys in which the runs differ"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Key"), runs.map((run) => h("th", { scope: "col" }, run.name)))),
      h("tbody", {}, differing.map((key) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key),
        tables.map((table) => h("td", { class: "mono" }, shown(table.get(key))))))))));
}
