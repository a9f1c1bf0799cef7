// A chart as a table: for screen readers, and for readers who want the figures.
import { h } from "../dom.js";
import { number } from "../format.js";

const MOST = 400;

/** What is in sight of a group's charts, row by row. */
export function figures(title, { axis, zoom }, series, format = number, formatX = number) {
  const rows = new Map();
  series.forEach((one, place) => {
    one.xs.forEach((x, index) => {
      if (zoom && (x < zoom[0] || x > zoom[1])) return;
      if (!rows.has(x)) rows.set(x, []);
      rows.get(x)[place] = one.ys[index];
    });
  });
  const all = [...rows.entries()].sort((a, b) => a[0] - b[0]);
  const every = Math.ceil(all.length / MOST);
  const shown = all.filter((_, index) => index % every === 0 || index === all.length - 1);
  const caption = every > 1 ? `${title}: every ${every}th of ${all.length} points` : `${title}: ${all.length} points`;
  return h("div", { class: "figures", tabindex: 0, role: "region", "aria-label": `${title} as a table` },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {},
        h("th", { scope: "col" }, axis),
        series.map((one) => h("th", { scope: "col" }, one.label)))),
      h("tbody", {}, shown.map(([x, values]) => h("tr", {},
        h("th", { scope: "row" }, formatX(x)),
        series.map((_, place) => h("td", {}, values[place] === undefined ? "" : format(values[place]))))))));
}
