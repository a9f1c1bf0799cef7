// One chart: a card with title and tools, a plot that answers to pointer and keys, a legend, and a table on demand.
import { fill, h, icon, perFrame, say } from "../dom.js";
import { number, seconds, whole } from "../format.js";
import { axisRoom, distinct, drawAxes, drawBars, drawCursor, drawLines, layout, scaleCanvas, swatch } from "./draw.js";
import { figures, Tip } from "./parts.js";
import { firstAt, nearest, shownValues } from "./scale.js";

const DRAG_PIXELS = 6;

export class Chart {
  /**
   * `group` is what the charts of the page share. Options: title, unit, hint, stacked, format (a value as text), min and max
   * (that the axis shows at least), span (what a constant 0 has around it). Data comes by `update`.
   */
  constructor(group, options) {
    this.group = group;
    this.options = { format: number, ...options };
    this.series = [];
    this.hidden = new Set();
    this.log = false;
    this.seen = false; // until it is known: most charts of a long page are out of sight
    this.#build();
    this.redraw = perFrame(() => this.draw());
    this.ended = new AbortController();
    const { signal } = this.ended;
    for (const what of ["look", "axis"]) group.addEventListener(what, this.redraw, { signal });
    group.addEventListener("cursor", perFrame(() => this.drawOver()), { signal });
    group.addEventListener("look", () => this.#lasts(), { signal });
    group.addEventListener("look", () => this.table && this.#figures(), { signal });
    addEventListener("theme", () => this.#legend(), { signal });
    this.sizes = new ResizeObserver(this.redraw);
    this.sizes.observe(this.plot);
    this.sight = new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      if (this.seen) this.redraw();
    }, { rootMargin: "200px" });
    this.sight.observe(this.plot);
  }

  /** The curves: [{label, colour, dash?, xs, ys, heldOut?, low?, high?}], xs ascending on the group's axis, no gaps. */
  update(series) {
    const labels = series.map((one) => one.label).join("\n");
    const before = this.series.map((one) => one.label).join("\n");
    this.series = distinct(series);
    if (labels !== before || !this.legendValues) this.#legend();
    else this.#lasts();
    if (this.table) this.#figures();
    this.redraw();
  }

  close() {
    this.ended.abort();
    this.sizes.disconnect();
    this.sight.disconnect();
  }

  get shown() {
    return this.series.filter((one) => !this.hidden.has(one.label));
  }

  formatX(value) {
    return this.group.axis === "time" ? seconds(value) : whole(value);
  }

  draw() {
    if (!this.seen || !this.plot.isConnected) return undefined;
    const { context, width, height } = scaleCanvas(this.canvas);
    if (width < 60 || height < 40) return undefined;
    const { stacked, format, min, max, span: least } = this.options;
    const { zoom, span, smoothing } = this.group;
    const shown = this.shown;
    this.nothing.hidden = shown.some((one) => one.xs.length);
    const fitted = { zoom: zoom ?? span, smoothing, log: this.log, stacked, min, max, span: least };
    const axes = { log: this.log, format };
    this.plan = layout(shown, width, height, fitted);
    if (!this.nothing.hidden) return this.drawOver();
    this.plan = layout(shown, width, height, { ...fitted, left: axisRoom(context, this.plan, axes) });
    const name = this.group.axis === "step" ? "step" : "";
    drawAxes(context, this.plan, { ...axes, name, formatX: axisText(this.group.axis, this.plan) });
    if (stacked) drawBars(context, this.plan, shown);
    else drawLines(context, this.plan, shown, { smoothing, log: this.log });
    return this.drawOver();
  }

  /** The cursor has a sheet of its own: it moves often, the curves do not. */
  drawOver() {
    if (!this.seen || !this.plan || !this.plot.isConnected) return;
    const { context } = scaleCanvas(this.over);
    if (this.group.cursor !== null && this.nothing.hidden) this.#cursor(context, this.group.cursor);
    else this.tip.hide();
  }

  #build() {
    const { title, unit, hint, stacked, lead, broad } = this.options;
    const tool = (name, label, act) =>
      h("button", { type: "button", class: "quiet", "aria-pressed": "false", title: label, "aria-label": `${label}: ${title}`, on: { click: act } }, name);
    this.tools = {
      log: tool("log", "Logarithmic scale", () => this.#toggleLog()),
      table: tool(icon("table"), "Show as a table", () => this.#toggleTable()),
      wide: tool(icon("wide"), "Use the whole width", () => this.#toggleWide()),
    };
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.over = h("canvas", { class: "over", "aria-hidden": "true" });
    this.nothing = h("p", { class: "nothing", hidden: true }, "no values here");
    this.plot = h("div", {
      class: "plot", tabindex: 0, role: "slider", "aria-label": `${title}: cursor`, "aria-orientation": "horizontal",
      "aria-valuenow": "0", "aria-valuetext": "no values yet",
      "aria-description": "Arrow keys move along the curve, plus and minus zoom, Escape shows all.",
      on: {
        pointermove: (event) => this.#move(event),
        pointerleave: () => this.drag === undefined && this.group.point(null),
        pointerdown: (event) => this.#press(event),
        pointerup: (event) => this.#release(event),
        pointercancel: () => this.#choose(null),
        dblclick: () => this.group.setZoom(null),
        keydown: (event) => this.#key(event),
        focus: () => this.plot.matches(":focus-visible") && this.#step(0),
        blur: () => this.group.point(null),
      },
    }, this.canvas, this.over, this.nothing);
    this.tip = new Tip(this.plot);
    this.legend = h("div", { class: "legend", role: "group", "aria-label": `Curves of ${title}` });
    this.element = h("section", { class: `chart ${lead ? "lead" : broad ? "broad" : ""}`, "aria-label": title },
      h("header", {},
        h("h3", {}, title),
        h("span", { class: "tools" }, stacked ? null : this.tools.log, this.tools.table, this.tools.wide),
        h("p", { class: "hint" }, unit && h("span", { class: "unit" }, unit), unit && hint ? " · " : "", hint)),
      this.plot, this.legend);
  }

  #legend() {
    this.legendValues = this.series.map(() => h("b", {}));
    const entries = this.series.map((one, index) => h("button", {
      type: "button", "aria-pressed": String(!this.hidden.has(one.label)), title: `${one.label}: click hides it, double click shows it alone`,
      on: { click: () => this.#toggle(one.label), dblclick: () => this.#only(one.label) },
    }, swatch(one, this.options.stacked),
    h("span", { class: "label" }, one.label), this.legendValues[index]));
    const focused = [...this.legend.children].indexOf(document.activeElement);
    fill(this.legend, entries);
    if (focused >= 0) this.legend.children[focused]?.focus();
    this.#lasts();
    this.redraw?.();
  }

  #lasts() {
    this.series.forEach((one, index) => {
      const values = shownValues(one, this.options.stacked ? 0 : this.group.smoothing);
      say(this.legendValues[index], values.length ? this.options.format(values[values.length - 1]) : "–");
    });
    const xs = this.#axisPoints();
    if (!xs.length) return;
    this.plot.setAttribute("aria-valuemin", xs[0]);
    this.plot.setAttribute("aria-valuemax", xs[xs.length - 1]);
    if (this.group.cursor === null) this.#speak(xs[xs.length - 1]);
  }

  #toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.#legend();
  }

  #only(label) {
    this.hidden = new Set(this.series.map((one) => one.label).filter((one) => one !== label));
    this.#legend();
  }

  #toggleLog() {
    this.log = !this.log;
    this.tools.log.setAttribute("aria-pressed", String(this.log));
    this.redraw();
  }

  #toggleWide() {
    const wide = this.element.classList.toggle("wide");
    this.tools.wide.setAttribute("aria-pressed", String(wide));
    this.redraw();
  }

  #toggleTable() {
    this.table?.remove();
    this.table = this.table ? null : h("div");
    this.tools.table.setAttribute("aria-pressed", String(Boolean(this.table)));
    if (this.table) {
      this.element.append(this.table);
      this.#figures();
    }
  }

  #figures() {
    const at = this.table.firstElementChild?.scrollTop ?? 0;
    fill(this.table, figures(this.options.title, this.group, this.shown, this.options.format, (x) => this.formatX(x)));
    this.table.firstElementChild.scrollTop = at;
  }

  /** The places the cursor stops at: those of the curve with the most points. */
  #axisPoints() {
    return this.shown.reduce((a, b) => (b.xs.length > a.length ? b.xs : a), []);
  }

  #points(at) {
    const [x0, x1] = [this.plan.x0, this.plan.x1];
    return this.shown.flatMap((one) => {
      const index = nearest(one.xs, at);
      if (index < 0 || one.xs[index] < x0 || one.xs[index] > x1) return [];
      const ys = shownValues(one, this.options.stacked ? 0 : this.group.smoothing);
      return [{ one, x: one.xs[index], y: ys[index], index: one.colour, low: one.low?.[index], high: one.high?.[index] }];
    });
  }

  #cursor(context, cursor) {
    const points = this.#points(cursor);
    drawCursor(context, this.plan, cursor, this.options.stacked ? [] : points);
    const own = this.plot.matches(":hover") || document.activeElement === this.plot;
    if (!own || !points.length || this.drag !== undefined) {
      this.tip.hide();
      return;
    }
    const { format } = this.options;
    this.tip.show(this.plan.toX(cursor), this.#where(cursor), points.map(({ one, x, y, low, high }) => ({
      sign: swatch(one, this.options.stacked),
      label: x === cursor ? one.label : `${one.label} (at ${this.formatX(x)})`,
      value: low === undefined || low === high ? format(y) : `${format(y)} (${format(low)} to ${format(high)})`,
    })));
  }

  #where(x) {
    return this.group.axis === "time" ? `after ${this.formatX(x)}` : `step ${this.formatX(x)}`;
  }

  #speak(x) {
    const data = this.shown.map((one) => {
      const index = nearest(one.xs, x);
      return index < 0 ? "" : `${one.label} ${this.options.format(one.ys[index])}`;
    });
    this.plot.setAttribute("aria-valuenow", x);
    this.plot.setAttribute("aria-valuetext", `${this.#where(x)}: ${data.filter(Boolean).join(", ")}`);
  }

  #snap(event) {
    const xs = this.#axisPoints();
    const at = nearest(xs, this.plan.fromX(event.offsetX));
    return at < 0 ? null : xs[at];
  }

  #move(event) {
    if (!this.plan) return;
    if (this.drag !== undefined) this.#choose([this.drag, event.offsetX]);
    else this.group.point(this.#snap(event));
  }

  #press(event) {
    if (event.button !== 0 || !this.plan) return;
    this.drag = event.offsetX;
    this.plot.setPointerCapture(event.pointerId);
  }

  #release(event) {
    const from = this.drag;
    this.#choose(null);
    if (from === undefined || Math.abs(event.offsetX - from) < DRAG_PIXELS) return;
    const ends = [from, event.offsetX].map((pixel) => this.plan.fromX(this.#inside(pixel))).sort((a, b) => a - b);
    this.group.setZoom(ends);
  }

  #inside(pixel) {
    const { left, width } = this.plan.area;
    return Math.max(left, Math.min(left + width, pixel));
  }

  /** Show what a drag would zoom into; null ends it. */
  #choose(pixels) {
    this.chosen?.remove();
    this.chosen = null;
    if (!pixels) {
      this.drag = undefined;
      return;
    }
    const [left, right] = pixels.map((pixel) => this.#inside(pixel)).sort((a, b) => a - b);
    this.chosen = h("div", { class: "chosen" });
    this.chosen.style.left = `${left}px`;
    this.chosen.style.width = `${right - left}px`;
    this.plot.append(this.chosen);
    this.tip.hide();
  }

  #key(event) {
    const far = Math.max(1, Math.round(this.#axisPoints().length / 20));
    const acts = {
      ArrowLeft: () => this.#step(event.shiftKey ? -far : -1),
      ArrowRight: () => this.#step(event.shiftKey ? far : 1),
      PageDown: () => this.#step(-far),
      PageUp: () => this.#step(far),
      Home: () => this.#step(-Infinity),
      End: () => this.#step(Infinity),
      "+": () => this.#zoom(0.5),
      "=": () => this.#zoom(0.5),
      "-": () => this.#zoom(2),
      Escape: () => this.group.setZoom(null),
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  #step(by) {
    const xs = this.#axisPoints();
    if (!xs.length || !this.plan) return;
    const first = firstAt(xs, this.plan.x0);
    const last = Math.max(first, firstAt(xs, this.plan.x1 + 1e-9) - 1);
    const here = this.group.cursor === null ? last : nearest(xs, this.group.cursor);
    const x = xs[Math.max(first, Math.min(last, here + by))];
    this.group.point(x);
    this.#speak(x);
  }

  #zoom(factor) {
    if (!this.plan) return;
    const { x0, x1 } = this.plan;
    const xs = this.#axisPoints();
    const middle = this.group.cursor ?? (x0 + x1) / 2;
    const half = ((x1 - x0) * factor) / 2;
    const [low, high] = [Math.max(xs[0], middle - half), Math.min(xs[xs.length - 1], middle + half)];
    this.group.setZoom(low <= xs[0] && high >= xs[xs.length - 1] ? null : [low, high]);
  }
}

/** Axis labels in one unit, whatever their value. */
function axisText(axis, { x1 }) {
  if (axis !== "time") return (value) => (Number.isInteger(value) ? whole(value) : "");
  if (x1 < 180) return (value) => `${number(value)} s`;
  if (x1 < 10_800) return (value) => `${number(value / 60)} min`;
  return (value) => `${number(value / 3600)} h`;
}
