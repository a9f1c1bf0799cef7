// One run: vital signs, curves, lanes and what it said.
import { Chart } from "../chart/chart.js";
import { controls, Group } from "../chart/parts.js";
import { Lanes } from "../chart/lanes.js";
import { arrange, points, SECTIONS } from "../curves.js";
import { announce, fill, h, perFrame } from "../dom.js";
import { amount, count, number, whole } from "../format.js";
import { eventsTable, healthPill, troubles } from "../status.js";
import { Vitals } from "../vitals.js";
import { badge, firstCause } from "./advice.js";

export const title = "Overview";

export function render(root, run, params) {
  const group = new Group(params);
  const board = new Board(group, run);
  const vitals = new Vitals(run);
  const lanes = new Lanes(run);
  const cause = h("div");
  const notices = h("div", { class: "stack" });
  const events = h("section", { class: "section", "aria-label": "Events" });
  const head = h("div", { class: "head" });
  const health = h("span");
  let advisories = 0;
  const waiting = h("div");
  const bar = h("div", { class: "sticky" }, controls(group, (text) => board.filter(text)));
  fill(root, h("div", { class: "stack" }, h("div", {}, head, notices), vitals.element, waiting, bar, board.element, lanes.element, events));
  board.place(lanes.element);

  const stand = () => {
    const { device, parameters } = run.status;
    fill(health, healthPill(run.standing.health, advisories));
    fill(head, h("h1", {}, run.name), health, run.standing.tags.map((tag) => h("span", { class: "tag" }, tag)),
      h("span", { class: "faint" }, [device, parameters && `${count(parameters)} parameters`].filter(Boolean).join(" · ")));
    fill(notices, cause, troubles(run));
    fill(events, eventsTable(run));
    vitals.draw();
    Promise.all([firstCause(run), badge(run)]).then(([found, count]) => {
      advisories = count;
      fill(cause, found);
      fill(health, healthPill(run.standing.health, advisories));
    }).catch(() => {}); // the next news tries again
  };
  const draw = perFrame(() => {
    board.draw();
    vitals.draw();
    bar.hidden = !run.rows;
    fill(waiting, run.rows ? null : h("div", { class: "empty" }, h("h2", {}, run.status.alive ? "No step is finished yet" : "No step was finished"),
      h("p", {}, run.status.alive ? "Curves appear here with the first one." : "This run ended before it trained.")));
  });
  let again = 0;
  const later = () => {
    draw();
    clearTimeout(again);
    again = setTimeout(() => !lanes.zoom && lanes.load(), 400);
    const { step, total_steps: total } = run.status;
    announce(`Step ${whole(run.columns.step.at(-1) ?? step)}${total ? ` of ${whole(total)}` : ""}, reward ${number(run.ends.reward?.last)}`);
  };
  const ends = [run.on("metrics", later), run.on("reset", later), run.on("standing", stand)];
  group.addEventListener("axis", draw);
  const clock = setInterval(() => vitals.draw(), 1000);
  stand();
  draw();
  return () => {
    ends.forEach((end) => end());
    clearInterval(clock);
    clearTimeout(again);
    board.close();
    lanes.close();
  };
}

/** The charts, in their sections. Charts stay where they are when lines come; a new metric brings a new one. */
class Board {
  constructor(group, run) {
    this.group = group;
    this.run = run;
    this.charts = new Map();
    this.text = "";
    this.sections = new Map(SECTIONS.map((name) => [name, this.#section(name)]));
    this.otherCount = h("span", { class: "faint" });
    this.others = h("div", { class: "charts" });
    this.other = h("details", { class: "section", hidden: true }, h("summary", {}, "Other metrics", this.otherCount), this.others);
    this.unfound = h("div", { class: "empty", hidden: true }, h("h2", {}, "No chart matches"));
    this.element = h("div", { class: "stack" }, [...this.sections.values()].map(({ element }) => element), this.other, this.unfound);
  }

  /** Lanes belong to the pace of a run. */
  place(element) {
    this.sections.get("Pace").element.append(element);
  }

  draw() {
    const columns = this.run.columns;
    const names = Object.keys(columns).filter((name) => columns[name].some((value) => value !== null));
    const arranged = arrange(names);
    const envs = [...new Set(arranged.flatMap(({ curves }) => curves.map(({ env }) => env)).filter(Boolean))];
    const { xs } = points(columns, this.group.axis, this.group.axis);
    this.group.span = xs.length > 1 ? [xs[0], xs.at(-1)] : null;
    for (const { chart, curves } of arranged) {
      const series = curves.map((curve, index) => ({
        label: curve.label, ...points(columns, curve.name, this.group.axis), dash: curve.dash,
        // An environment has one colour everywhere, and so has a part of the step.
        colour: chart.colours?.[curve.what] ?? (curve.byEnv ? envs.indexOf(curve.env) : index),
      }));
      // A reason that never struck needs no place in a stack.
      this.#chart(chart).update(chart.busy ? series.filter((one) => one.ys.some((value) => value !== 0)) : series);
    }
    this.filter(this.text);
  }

  filter(text) {
    this.text = text;
    let shown = 0;
    for (const { chart, words } of this.charts.values()) {
      const fits = !text || words.includes(text) || chart.series.some((one) => one.label.toLowerCase().includes(text));
      chart.element.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    for (const { element, grid } of this.sections.values()) {
      element.hidden = ![...grid.children].some((child) => !child.hidden);
    }
    const others = [...this.others.children].filter((child) => !child.hidden).length;
    this.other.hidden = !others;
    this.other.open ||= Boolean(text && others);
    this.otherCount.textContent = amount(others, "chart");
    this.unfound.hidden = Boolean(shown) || !this.charts.size;
  }

  close() {
    for (const { chart } of this.charts.values()) chart.close();
  }

  #section(name) {
    const grid = h("div", { class: "charts" });
    return { grid, element: h("section", { class: "section", "aria-label": name, hidden: true }, h("h2", {}, name), grid) };
  }

  #chart(spec) {
    if (!this.charts.has(spec.id)) {
      const chart = new Chart(this.group, spec);
      this.charts.set(spec.id, { chart, words: `${spec.title} ${spec.unit} ${spec.hint} ${spec.section}`.toLowerCase() });
      const home = this.sections.get(spec.section)?.grid ?? this.others;
      home.append(chart.element);
    }
    return this.charts.get(spec.id).chart;
  }
}
