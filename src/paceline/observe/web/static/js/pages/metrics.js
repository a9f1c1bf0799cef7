// The user's own metrics: what environments measure, and every key that is not Paceline's, each in a chart of its own.
import { Chart } from "../chart/chart.js";
import { controls, Group } from "../chart/parts.js";
import { ownMetrics, points } from "../curves.js";
import { fill, h, perFrame } from "../dom.js";

export const title = "Metrics";

export function render(root, run, params) {
  const group = new Group(params);
  const charts = new Map();
  const board = h("div", { class: "stack" });
  const empty = h("div");
  let wanted = "";
  const bar = h("div", { class: "sticky" }, controls(group, (text) => filter(text)));
  fill(root, h("div", { class: "stack" },
    h("div", {}, h("div", { class: "head" }, h("h1", {}, "Metrics")),
      h("p", { class: "soft" }, "What environments measure, and whatever else the run logs beside Paceline's own figures, by the first parts of its keys.")),
    bar, empty, board));

  function sectionOf(prefix) {
    const known = [...board.children].find((one) => one.dataset.prefix === prefix);
    if (known) return known.lastElementChild;
    const name = prefix || "Without a prefix";
    const grid = h("div", { class: "charts" });
    board.append(h("section", { class: "section", "aria-label": name, data: { prefix } }, h("h2", { class: prefix ? "mono" : null }, name), grid));
    return grid;
  }

  function filter(text) {
    wanted = text;
    for (const [name, chart] of charts) chart.element.hidden = !name.toLowerCase().includes(wanted);
    for (const section of board.children) section.hidden = ![...section.lastElementChild.children].some((one) => !one.hidden);
    const none = ![...board.children].some((one) => !one.hidden);
    fill(empty, none ? h("div", { class: "empty" }, h("h2", {}, charts.size ? "No metric matches" : run.status.alive ? "No metrics of your own yet" : "No metrics of your own"),
      charts.size ? null : h("p", {}, "Whatever an environment returns in its metrics appears here with the first step that trains, with no setting to make. Each rollout shows its own.")) : null);
  }

  const draw = perFrame(() => {
    const { columns } = run;
    const { xs } = points(columns, group.axis, group.axis);
    group.span = xs.length > 1 ? [xs[0], xs.at(-1)] : null;
    const names = Object.keys(columns).filter((name) => columns[name].some((value) => value !== null));
    for (const { prefix, name } of ownMetrics(names)) {
      if (!charts.has(name)) {
        const chart = new Chart(group, { title: name });
        charts.set(name, chart);
        sectionOf(prefix).append(chart.element);
      }
      charts.get(name).update([{ label: name.slice(prefix ? prefix.length + 1 : 0), colour: 0, ...points(columns, name, group.axis) }]);
    }
    bar.hidden = !charts.size;
    filter(wanted);
  });
  const ends = [run.on("metrics", draw), run.on("reset", draw)];
  group.addEventListener("axis", draw);
  draw();
  return () => {
    ends.forEach((end) => end());
    for (const chart of charts.values()) chart.close();
  };
}
