// What charts share: the group of charts on a page, the bar above them, the box beside the pointer, and the table of figures.
import { fill, h, memory } from "../dom.js";
import { number } from "../format.js";
import { replaceAddress } from "../router.js";

const MOST_SMOOTHING = 0.98;
const VIEW = ["axis", "smoothing", "from", "to"];

export class Group extends EventTarget {
  /**
   * With `params`, those of the page's address, the view is read from there and kept there: `axis=time`, `smoothing=0.6`,
   * `from=` and `to=` on the axis. An address without any of them shows the whole as the reader saw the last page.
   */
  constructor(params = null) {
    super();
    this.inAddress = params !== null;
    const given = VIEW.some((key) => params?.has(key));
    const wanted = (key) => (given ? params.get(key) : params && memory.get(key, null));
    /** "step", or "time": seconds since the first line. */
    this.axis = wanted("axis") === "time" ? "time" : "step";
    this.smoothing = Math.max(0, Math.min(MOST_SMOOTHING, Number(wanted("smoothing")) || 0));
    /** [from, to] on the axis, or null for everything. */
    this.zoom = zoomOf(params);
    /** What "everything" is: the first and the last place of all charts, so that they stand under one another. */
    this.span = null;
    /** Where the reader points, on the axis, or null. */
    this.cursor = null;
    if (!given) this.keep();
  }

  /** Write the view into the address, so that Back and a link to it show the same. */
  keep() {
    if (!this.inAddress) return;
    const [path, query] = location.hash.split("?", 2);
    const params = new URLSearchParams(query ?? "");
    const [from, to] = (this.zoom ?? []).map((place) => Number(place.toFixed(2)));
    const view = { axis: this.axis === "step" ? null : this.axis, smoothing: this.smoothing || null, from, to };
    for (const key of VIEW) {
      if (view[key] === null || view[key] === undefined) params.delete(key);
      else params.set(key, view[key]);
    }
    const text = params.toString();
    replaceAddress(text ? `${path}?${text}` : path);
  }

  setAxis(axis) {
    this.axis = axis;
    this.zoom = this.cursor = null;
    memory.set("axis", axis);
    this.keep();
    this.#tell("axis");
  }

  setSmoothing(weight) {
    this.smoothing = weight;
    memory.set("smoothing", weight);
    this.#tell("look");
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.keep();
    this.#tell("look");
  }

  point(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.#tell("cursor");
  }

  #tell(what) {
    this.dispatchEvent(new Event(what));
  }
}

function zoomOf(params) {
  const [from, to] = ["from", "to"].map((key) => Number(params?.get(key) ?? NaN));
  return from < to ? [from, to] : null;
}

/** `filter` is called with what is typed; "/" goes there. */
export function controls(group, filter) {
  const axes = ["step", "time"].map((axis) => h("button", {
    type: "button", "aria-pressed": String(group.axis === axis), on: { click: () => group.setAxis(axis) },
  }, axis));
  group.addEventListener("axis", () => {
    axes.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === group.axis)));
    show();
  });
  const value = h("output", {}, group.smoothing ? group.smoothing.toFixed(2) : "off");
  const range = h("input", {
    type: "range", min: 0, max: MOST_SMOOTHING, step: 0.02, value: group.smoothing, "aria-label": "Smoothing",
    on: {
      input: () => {
        group.setSmoothing(Number(range.value));
        value.textContent = group.smoothing ? group.smoothing.toFixed(2) : "off";
      },
      change: () => group.keep(), // not at each move: browsers limit how often an address may change
    },
  });
  const reset = h("button", { type: "button", hidden: !group.zoom, on: { click: () => group.setZoom(null) } }, "Show all steps");
  const show = () => (reset.hidden = !group.zoom);
  group.addEventListener("look", show);
  const search = h("input", {
    type: "search", placeholder: "Find a chart  /", "aria-label": "Find a chart", "aria-keyshortcuts": "/", data: { search: "" },
    on: { input: () => filter(search.value.trim().toLowerCase()) },
  });
  return h("div", { class: "controls" },
    search,
    h("label", {}, "Along", h("span", { class: "choice", role: "group", "aria-label": "Axis" }, axes)),
    h("label", {}, "Smoothing", range, value),
    h("span", { class: "grow" }),
    reset);
}

export class Tip {
  constructor(parent) {
    this.element = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.parent = parent;
    parent.append(this.element);
  }

  /** Show a heading and entries [{sign, label, value}] beside x, inside the parent. */
  show(x, heading, entries) {
    const rows = entries.map(({ sign, label, value }) => h("div", { class: "entry" }, sign, h("span", {}, label), h("b", {}, value)));
    fill(this.element, h("div", { class: "head" }, heading), rows);
    this.element.hidden = false;
    const { width } = this.element.getBoundingClientRect();
    const room = this.parent.clientWidth;
    const left = x + 14 + width > room ? Math.max(0, x - 14 - width) : x + 14;
    this.element.style.left = `${left}px`;
    this.element.style.top = "6px";
  }

  hide() {
    this.element.hidden = true;
  }
}

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
