// Lanes: who did what, when. A crowded lane shows shares as height; zoomed in, the stretches themselves.
import { ask } from "../api.js";
import { fill, h, icon, perFrame } from "../dom.js";
import { clock, number, percent, seconds, whole } from "../format.js";
import { colour, line, seriesColour, scaleCanvas } from "./draw.js";
import { ticks } from "./scale.js";
import { Tip } from "./parts.js";

const RIGHT = 10;
const WIDEST = 190;
const ROW = 30;
const BAR = 22;
const AXIS = 22;
const WORK = { train: 0, sample: 2, busy: 2, score: 5, publish: 1, eval: 3, playing: 7, calls: 4 };
const IDLE = /^(wait|idle)/;
const NAMES = { eval: "evaluate" };

export class Lanes {
  constructor(run) {
    this.run = run;
    this.data = null;
    this.zoom = null;
    this.at = null;
    this.kinds = [];
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.plot = h("div", {
      class: "plot", tabindex: 0, role: "slider", "aria-label": "What each part did: cursor over time",
      "aria-valuenow": "0", "aria-valuetext": "nothing yet",
      "aria-description": "Left and right move in time, plus and minus zoom, Escape shows all.",
      on: {
        pointermove: (event) => this.#move(event),
        pointerleave: () => this.drag === undefined && this.#point(null),
        pointerdown: (event) => this.#press(event),
        pointerup: (event) => this.#release(event),
        dblclick: () => this.#look(null),
        keydown: (event) => this.#key(event),
        blur: () => this.#point(null),
      },
    }, this.canvas);
    this.tip = new Tip(this.plot);
    this.legend = h("div", { class: "legend" });
    this.shares = h("div");
    this.tableButton = h("button", { type: "button", class: "quiet", "aria-pressed": "false", title: "Show as a table", "aria-label": "Show as a table: what each part did", on: { click: () => this.#toggleTable() } }, icon("table"));
    this.reset = h("button", { type: "button", class: "quiet", hidden: true, on: { click: () => this.#look(null) } }, "show all");
    this.hint = h("p", { class: "hint" });
    this.element = h("section", { class: "chart lanes", "aria-label": "What each part did over time" },
      h("header", {}, h("h3", {}, "What each part did over time"), h("span", { class: "tools" }, this.reset, this.tableButton), this.hint),
      this.plot, this.legend, this.shares);
    this.redraw = perFrame(() => this.draw());
    this.ended = new AbortController();
    addEventListener("theme", () => this.#legend(), { signal: this.ended.signal });
    this.sizes = new ResizeObserver(this.redraw);
    this.sizes.observe(this.plot);
    this.element.hidden = true;
    this.load();
  }

  close() {
    this.ended.abort();
    this.sizes.disconnect();
  }

  /** Ask for what is in sight. */
  async load() {
    if (this.loading) {
      this.again = true;
      return;
    }
    this.loading = true;
    const [start, end] = this.zoom ?? [null, null];
    const bins = Math.max(100, Math.min(1200, Math.round((this.plot.clientWidth || 1000) / 2)));
    try {
      this.data = await ask("lanes", { run: this.run.name, start, end, bins });
      this.element.hidden = !this.data.lanes.length;
      this.hint.textContent = this.data.source === "metrics"
        ? "share of the time, from the times of each step; drag to zoom into a moment" : "share of the time; drag to zoom into a moment";
      this.#legend();
    } catch (error) {
      this.hint.textContent = error.message;
    }
    this.loading = false;
    if (this.again) {
      this.again = false;
      this.load();
    }
  }

  draw() {
    if (!this.data?.lanes.length) return;
    const { lanes, extent } = this.data;
    this.plot.style.height = `${lanes.length * ROW + AXIS + 4}px`;
    const { context, width } = scaleCanvas(this.canvas);
    if (width < 200) return;
    const [t0, t1] = extent[1] > extent[0] ? extent : [extent[0], extent[0] + 1];
    this.left = Math.min(WIDEST, width / 3, 16 + Math.max(...lanes.map(({ lane }) => context.measureText(lane).width)));
    const room = width - this.left - RIGHT;
    this.toX = (time) => this.left + ((time - t0) / (t1 - t0)) * room;
    this.fromX = (pixel) => t0 + ((pixel - this.left) / room) * (t1 - t0);
    lanes.forEach(({ lane, spans }, place) => this.#lane(context, lane, spans, place * ROW + 4, room));
    this.#axis(context, t0, t1, lanes.length * ROW + 4, width);
    if (this.at !== null) this.#cursor(context, lanes.length * ROW + 4);
    else this.tip.hide();
  }

  #lane(context, lane, spans, top, room) {
    context.fillStyle = colour("soft");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(fitText(context, lane, this.left - 14), this.left - 10, top + BAR / 2);
    context.fillStyle = colour("raised");
    context.fillRect(this.left, top, room, BAR);
    const floors = new Map();
    for (const [start, end, kind, share] of spans) {
      const left = Math.max(this.left, this.toX(start));
      const right = Math.min(this.left + room, this.toX(end));
      if (right <= this.left || left >= this.left + room) continue;
      const floor = floors.get(start) ?? 0;
      const height = BAR * share;
      context.fillStyle = ink(kind);
      context.globalAlpha = IDLE.test(kind) ? 0.55 : 1;
      context.fillRect(left, top + BAR - floor - height, Math.max(0.6, right - left), height);
      if (share < 1) floors.set(start, floor + height);
    }
    context.globalAlpha = 1;
  }

  #axis(context, t0, t1, top, width) {
    context.fillStyle = colour("faint");
    context.textBaseline = "top";
    context.strokeStyle = colour("line-strong");
    const began = this.run.status.began ?? t0;
    const span = t1 - began;
    const [unit, name] = span < 300 ? [1, "s"] : span < 10_800 ? [60, "min"] : [3600, "h"];
    for (const mark of ticks((t0 - began) / unit, (t1 - began) / unit, width / 110)) {
      const x = this.toX(began + mark * unit);
      line(context, Math.round(x) + 0.5, top, Math.round(x) + 0.5, top + 4);
      const text = `${number(mark)} ${name}`;
      const half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(x, width - half - 2), top + 7);
    }
  }

  #cursor(context, bottom) {
    const x = this.toX(this.at);
    context.strokeStyle = colour("text");
    context.lineWidth = 1;
    line(context, Math.round(x) + 0.5, 2, Math.round(x) + 0.5, bottom);
    const own = this.plot.matches(":hover") || document.activeElement === this.plot;
    if (!own || this.drag !== undefined) return this.tip.hide();
    const found = this.#under(this.at);
    const entries = found.map(({ lane, kind, share, start, end, step, detail, binned }) => ({
      sign: h("span", { class: "swatch block", vars: { "--swatch": ink(kind) } }),
      label: `${lane}: ${NAMES[kind] ?? kind}${step === null ? "" : `, step ${whole(step)}`}${detail ? `, ${detail}` : ""}`,
      value: binned ? percent(share) : seconds(end - start),
    }));
    const began = this.run.status.began ?? this.data.extent[0];
    return this.tip.show(x, `${clock(this.at)}, after ${seconds(Math.max(0, this.at - began))}`, entries.length ? entries : [{ label: "nothing recorded", value: "" }]);
  }

  #under(time) {
    return this.data.lanes.flatMap(({ lane, spans, binned }) =>
      spans.filter(([start, end]) => start <= time && time < end)
        .map(([start, end, kind, share, step, detail]) => ({ lane, start, end, kind, share, step, detail, binned })));
  }

  /** The legend says what share of the time in sight each kind of work took; the table says it for each lane. */
  #legend() {
    if (!this.data) return;
    const [t0, t1] = this.data.extent ?? [0, 1];
    const kinds = new Set(this.data.lanes.flatMap(({ spans }) => spans.map((span) => span[2])));
    fill(this.legend, [...kinds].map((kind) => h("span", { class: "tag" },
      h("span", { class: "row" }, h("span", { class: "swatch block", vars: { "--swatch": ink(kind) } }), NAMES[kind] ?? kind))));
    this.reset.hidden = !this.zoom;
    this.plot.setAttribute("aria-valuemin", t0);
    this.plot.setAttribute("aria-valuemax", t1);
    this.plot.setAttribute("aria-valuenow", this.at ?? t1);
    this.plot.setAttribute("aria-valuetext", this.#shares().map(([lane, kind, share]) => `${lane} ${kind} ${percent(share)}`).join(", "));
    if (this.table) this.#figures();
    this.redraw();
  }

  #shares() {
    const [t0, t1] = this.data.extent ?? [0, 1];
    return this.data.lanes.flatMap(({ lane, spans }) => {
      const sums = new Map();
      for (const [start, end, kind, share] of spans) {
        sums.set(kind, (sums.get(kind) ?? 0) + share * Math.max(0, Math.min(end, t1) - Math.max(start, t0)));
      }
      return [...sums].map(([kind, sum]) => [lane, NAMES[kind] ?? kind, sum / (t1 - t0), sum]);
    });
  }

  #toggleTable() {
    this.table = !this.table;
    this.tableButton.setAttribute("aria-pressed", String(this.table));
    if (this.table) this.#figures();
    else fill(this.shares);
  }

  #figures() {
    const rows = this.#shares().map(([lane, kind, share, sum]) => h("tr", {},
      h("th", { scope: "row" }, lane), h("td", {}, kind), h("td", {}, percent(share)), h("td", {}, seconds(sum))));
    fill(this.shares, h("div", { class: "figures", tabindex: 0, role: "region", "aria-label": "Shares of time as a table" },
      h("table", {}, h("caption", {}, "Share of the time in sight"),
        h("thead", {}, h("tr", {}, ["lane", "work", "share", "time"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows))));
  }

  #point(time) {
    this.at = time;
    if (time !== null && this.data) {
      const data = this.#under(time).map(({ lane, kind }) => `${lane} ${kind}`).join(", ");
      this.plot.setAttribute("aria-valuenow", time);
      this.plot.setAttribute("aria-valuetext", `${clock(time)}: ${data || "nothing"}`);
    }
    this.redraw();
  }

  #look(zoom) {
    this.zoom = zoom;
    this.load();
  }

  #move(event) {
    if (!this.fromX) return;
    this.#point(Math.max(this.data.extent[0], this.fromX(event.offsetX)));
    if (this.drag !== undefined) this.#choose(this.drag, event.offsetX);
  }

  #press(event) {
    if (event.button !== 0 || !this.fromX) return;
    this.drag = Math.max(this.left, event.offsetX);
    this.plot.setPointerCapture(event.pointerId);
  }

  #release(event) {
    const from = this.drag;
    this.drag = undefined;
    this.chosen?.remove();
    if (from === undefined || Math.abs(event.offsetX - from) < 6) return;
    this.#look([from, Math.max(this.left, event.offsetX)].map(this.fromX).sort((a, b) => a - b));
  }

  #choose(from, to) {
    this.chosen?.remove();
    const [left, right] = [from, Math.max(this.left, to)].sort((a, b) => a - b);
    this.chosen = h("div", { class: "chosen" });
    this.chosen.style.left = `${left}px`;
    this.chosen.style.width = `${right - left}px`;
    this.plot.append(this.chosen);
  }

  #key(event) {
    if (!this.data?.extent || event.ctrlKey || event.metaKey || event.altKey) return;
    const [t0, t1] = this.data.extent;
    const here = this.at ?? t1;
    const by = (t1 - t0) / (event.shiftKey ? 20 : 200);
    const within = (time) => Math.max(t0, Math.min(t1 - 1e-6, time));
    const zoom = (factor) => this.#look([here - ((t1 - t0) * factor) / 2, here + ((t1 - t0) * factor) / 2]);
    const acts = {
      ArrowLeft: () => this.#point(within(here - by)),
      ArrowRight: () => this.#point(within(here + by)),
      Home: () => this.#point(t0),
      End: () => this.#point(within(t1)),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => this.#look(null),
      Escape: () => this.#look(null),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }
}

/** As much of a name as there is room for. */
function fitText(context, text, room) {
  let shown = text;
  while (shown.length > 1 && context.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
  return shown;
}

function ink(kind) {
  if (IDLE.test(kind)) return colour("line-strong");
  return seriesColour(WORK[kind] ?? 4);
}
