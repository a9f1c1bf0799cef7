// Drawing on a canvas: axes, lines, bands and stacked bars, in the colours of the theme.
import { h } from "../dom.js";
import { number } from "../format.js";
import { firstAt, logTicks, paddedRange, shownValues, thin, ticks } from "./scale.js";

const PALE = 0.45; // Opacity of the ninth part of a stack to the 16th; those behind are hatched.
export const MARGIN = { left: 48, right: 10, top: 8, bottom: 20 };
const COLOURS = 8;
const EDGE = 4; // Pixels beside the plot in which lines and points at its edge are drawn whole.
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

/** The theme's colours by name: colour("series-1"). */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function seriesColour(index) {
  return colour(`series-${(index % COLOURS) + 1}`);
}

/** The series, each with a pair of colour and dash of its own: where a pair is taken, the colour stays and the dash changes. */
export function distinct(series) {
  const taken = new Set();
  return series.map((one) => {
    const place = one.colour % COLOURS;
    let dash = (one.dash ?? 0) + Math.floor(one.colour / COLOURS);
    while (taken.has(`${place} ${dash}`)) dash += 1;
    taken.add(`${place} ${dash}`);
    return { ...one, colour: place, dash };
  });
}

/** The lengths of lines and gaps of a dash: none, lines, dots, then a line with one dot more each. */
export function dashLengths(dash) {
  return [[], [6, 3], [2, 3]][dash] ?? [8, 3, ...new Array(dash - 2).fill([2, 3]).flat()];
}

/** The sign of a series in a legend, in its colour and dash; `block` for one of a stack. */
export function swatch({ colour: index, dash = 0 }, block = false) {
  if (block) {
    const vars = dash > 1 ? { "--dashes": `repeating-linear-gradient(${dash % 2 ? 45 : 135}deg, var(--swatch) 0 2px, transparent 2px ${dash + 1}px)` } : {};
    return h("span", { class: `swatch block${["", " pale"][dash] ?? " hatched"}`, vars: { "--swatch": seriesColour(index), ...vars } });
  }
  const lengths = dashLengths(dash);
  let at = 0;
  const stops = lengths.map((length, place) => `${place % 2 ? "transparent" : "var(--swatch)"} ${at}px ${(at += length)}px`);
  const vars = dash ? { "--dashes": `repeating-linear-gradient(90deg, ${stops.join(", ")})`, "--period": `${Math.max(at, 18)}px` } : {};
  return h("span", { class: `swatch${dash ? " dashed" : ""}`, vars: { "--swatch": seriesColour(index), ...vars } });
}

/** Make a canvas as sharp as the screen; returns its context and its size in CSS pixels. */
export function scaleCanvas(canvas) {
  const ratio = devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return { context, width, height };
}

/**
 * Where things are: domains and the functions between values and pixels.
 * `series` are {xs, ys, low?, high?}; `options` are {zoom, log, smoothing, stacked, min, max, span, left}.
 */
export function layout(series, width, height, options) {
  const area = {
    left: options.left ?? MARGIN.left,
    top: MARGIN.top,
    width: Math.max(1, width - (options.left ?? MARGIN.left) - MARGIN.right),
    height: Math.max(1, height - MARGIN.top - MARGIN.bottom),
  };
  let [x0, x1] = options.zoom ?? extent(series);
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const bars = options.stacked ? stack(series, x0, x1, Math.floor(area.width / 3)) : null;
  // The first bar and the last one are whole.
  if (bars?.length > 1) [x0, x1] = [x0 - bars[0].width / 2, x1 + bars[0].width / 2];
  const toX = (value) => area.left + ((value - x0) / (x1 - x0)) * area.width;
  const fromX = (pixel) => x0 + ((pixel - area.left) / area.width) * (x1 - x0);
  let [y0, y1] = bars ? [0, Math.max(0, ...bars.map((bar) => bar.sum))] : valueRange(series, x0, x1, options);
  if (options.log) [y0, y1] = y0 < y1 ? [y0 / 1.15, y1 * 1.15] : [y0 / 2, y1 * 2];
  else [y0, y1] = paddedRange(y0, y1, bars ? { min: 0 } : options);
  const scale = options.log ? Math.log10 : (value) => value;
  const [s0, s1] = [scale(y0), scale(y1)];
  const toY = (value) => area.top + area.height - ((scale(value) - s0) / (s1 - s0)) * area.height;
  return { area, x0, x1, y0, y1, toX, fromX, toY, bars };
}

function extent(series) {
  let [low, high] = [Infinity, -Infinity];
  for (const { xs } of series) {
    if (!xs.length) continue;
    low = Math.min(low, xs[0]);
    high = Math.max(high, xs[xs.length - 1]);
  }
  return Number.isFinite(low) ? [low, high] : [0, 1];
}

function valueRange(series, x0, x1, { log, smoothing }) {
  let [low, high] = [Infinity, -Infinity];
  for (const one of series) {
    const smooth = shownValues(one, smoothing);
    const [from, to] = [firstAt(one.xs, x0), Math.min(one.xs.length, firstAt(one.xs, x1) + 1)];
    for (const values of [one.low ?? smooth, one.high ?? smooth, smooth]) {
      for (let index = from; index < to; index += 1) {
        const value = values[index];
        if (log && value <= 0) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (log && !Number.isFinite(low)) return [0.1, 1];
  return [low, high];
}

/** Bars of equal width: at each the mean of every series over the steps it stands for, one on top of the other. */
function stack(series, x0, x1, most) {
  const longest = series.reduce((a, b) => (b.xs.length > (a?.xs.length ?? 0) ? b : a), null);
  if (!longest) return [];
  const { xs } = longest;
  const spacing = xs.length > 1 ? (xs[xs.length - 1] - xs[0]) / (xs.length - 1) || 1 : 1;
  const width = spacing * Math.max(1, Math.ceil((x1 - x0) / spacing / Math.max(1, most)));
  // Bars begin half a step before their first step, so that whole steps fall into each.
  const start = xs[0] - spacing / 2;
  const bars = [];
  for (let place = Math.floor((x0 - start) / width); start + place * width < x1; place += 1) {
    const [left, right] = [start + place * width, start + (place + 1) * width];
    const within = (along) => [firstAt(along, left), firstAt(along, right)];
    const [first, end] = within(longest.xs);
    const parts = series.map((one) => {
      const [from, to] = within(one.xs);
      let sum = 0;
      for (let index = from; index < to; index += 1) sum += one.ys[index];
      return sum / Math.max(1, end - first); // a step that does not name it had none
    });
    bars.push({ middle: (left + right) / 2, width, parts, sum: parts.reduce((a, b) => a + Math.max(0, b), 0) });
  }
  return bars;
}

/** The values beside the plot, as text: [{value, text}]. */
function axisMarks({ area, y0, y1 }, { log, format = number }) {
  const marks = log ? logTicks(y0, y1) : ticks(y0, y1, Math.max(2, area.height / 32));
  const digits = decimals(marks);
  return marks.map((value) => ({ value, text: log || format !== number ? format(value) : tickText(value, digits) }));
}

/** The room that the values beside the plot take; at least the margin, so that charts stand under one another. */
export function axisRoom(context, plan, options) {
  return Math.max(MARGIN.left, ...axisMarks(plan, options).map(({ text }) => Math.ceil(context.measureText(text).width) + 11));
}

/** `formatX` is the text of a place on the axis; the first one also names the axis. */
export function drawAxes(context, plan, { log, format = number, formatX = number, name = "" }) {
  const { area, x0, x1, toX, toY } = plan;
  context.lineWidth = 1;
  context.fillStyle = colour("faint");
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const { value, text } of axisMarks(plan, { log, format })) {
    const y = Math.round(toY(value)) + 0.5;
    context.strokeStyle = colour(value === 0 && !log ? "line-strong" : "grid");
    line(context, area.left, y, area.left + area.width, y);
    context.fillText(text, area.left - 7, y);
  }
  context.textBaseline = "top";
  const isInside = (value) => toX(value) >= area.left - 1 && toX(value) <= area.left + area.width + 1;
  const along = ticks(x0, x1, Math.max(2, area.width / 90)).filter((value) => isInside(value) && formatX(value));
  along.forEach((value, place) => {
    const text = place || !name ? formatX(value) : `${name} ${formatX(value)}`;
    const half = context.measureText(text).width / 2;
    context.textAlign = "center";
    const last = area.left + area.width + MARGIN.right - half;
    context.fillText(text, Math.max(half, Math.min(toX(value), last)), area.top + area.height + 6);
  });
}

/** Decimals that tell neighbouring ticks apart. */
function decimals(marks) {
  const gap = marks.length > 1 ? Math.abs(marks[1] - marks[0]) : Math.abs(marks[0]) || 1;
  return Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9));
}

function tickText(value, digits) {
  if (value !== 0 && (Math.abs(value) >= 1e4 || digits > 4)) return number(value);
  return value.toFixed(Math.min(digits, 4)).replace("-", "−");
}

export function drawLines(context, plan, series, { smoothing, log }) {
  const { area } = plan;
  context.save();
  context.beginPath();
  context.rect(area.left - EDGE, area.top - EDGE, area.width + 2 * EDGE, area.height + 2 * EDGE);
  context.clip();
  context.lineJoin = "round";
  for (const one of series) {
    const ink = seriesColour(one.colour);
    if (one.low) band(context, plan, one, ink, log);
    const smooth = shownValues(one, smoothing);
    context.setLineDash(dashLengths(one.dash ?? 0));
    if (smooth !== one.ys) curve(context, plan, one.xs, one.ys, ink, 1, 0.28, log);
    curve(context, plan, one.xs, smooth, ink, 1.6, 1, log);
  }
  context.restore();
}

function curve(context, plan, xs, ys, ink, width, alpha, log) {
  const { toX, toY, area, x0, x1 } = plan;
  const from = Math.max(0, firstAt(xs, x0) - 1);
  const to = Math.min(xs.length, firstAt(xs, x1) + 1);
  const kept = thin(xs, ys, from, to, toX, area.width);
  context.strokeStyle = context.fillStyle = ink;
  context.lineWidth = width;
  context.globalAlpha = alpha;
  context.beginPath();
  let pen = false;
  for (const index of kept) {
    if (log && ys[index] <= 0) {
      pen = false;
      continue;
    }
    if (pen) context.lineTo(toX(xs[index]), toY(ys[index]));
    else context.moveTo(toX(xs[index]), toY(ys[index]));
    pen = true;
  }
  context.stroke();
  if (alpha === 1 && to - from <= area.width / 14) {
    for (const index of kept) if (!log || ys[index] > 0) dot(context, toX(xs[index]), toY(ys[index]), 2.2);
  }
  context.globalAlpha = 1;
}

function band(context, plan, { xs, low, high }, ink, log) {
  const { toX, toY, y0 } = plan;
  const down = (value) => toY(log ? Math.max(value, y0) : value);
  context.fillStyle = ink;
  context.globalAlpha = 0.16;
  context.beginPath();
  xs.forEach((x, index) => context[index ? "lineTo" : "moveTo"](toX(x), down(high[index])));
  for (let index = xs.length - 1; index >= 0; index -= 1) context.lineTo(toX(xs[index]), down(low[index]));
  context.fill();
  context.globalAlpha = 1;
}

export function drawBars(context, plan, series) {
  const { area, bars, toX, toY } = plan;
  const pixels = bars.length > 1 ? toX(bars[1].middle) - toX(bars[0].middle) : Math.min(40, area.width);
  const width = pixels > 6 ? Math.min(pixels * 0.8, 28) : pixels + 0.5;
  context.save();
  context.beginPath();
  context.rect(area.left, area.top, area.width, area.height + 1);
  context.clip();
  const fills = series.map(({ colour: index, dash }) => (dash > 1 ? hatched(context, seriesColour(index), dash) : seriesColour(index)));
  for (const { middle, parts } of bars) {
    let floor = 0;
    parts.forEach((value, place) => {
      if (!(value > 0)) return;
      const [top, bottom] = [toY(floor + value), toY(floor)];
      context.fillStyle = fills[place];
      context.globalAlpha = series[place].dash === 1 ? PALE : 1;
      context.fillRect(toX(middle) - width / 2, top, width, bottom - top);
      floor += value;
    });
  }
  context.restore();
}

/** Stripes in a colour, with gaps and a slant for each dash. */
function hatched(context, ink, dash) {
  const size = 2 * (dash + 1);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = ink;
  pen.lineWidth = 1.6;
  for (const shift of [-size, 0, size]) {
    if (dash % 2) line(pen, shift, 0, shift + size, size);
    else line(pen, shift, size, shift + size, 0);
  }
  return context.createPattern(tile, "repeat");
}

/** The line under the reader's eye, and a dot on every curve there. */
export function drawCursor(context, plan, x, points) {
  const { area, toX, toY } = plan;
  const at = toX(x);
  if (at < area.left - 1 || at > area.left + area.width + 1) return;
  context.strokeStyle = colour("faint");
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  line(context, Math.round(at) + 0.5, area.top, Math.round(at) + 0.5, area.top + area.height);
  context.setLineDash([]);
  for (const { x: px, y, index } of points) {
    if (!Number.isFinite(toY(y))) continue;
    context.fillStyle = colour("surface");
    dot(context, toX(px), toY(y), 4.5);
    context.fillStyle = seriesColour(index);
    dot(context, toX(px), toY(y), 3);
  }
}

export function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** A curve as small as a word. */
export function spark(canvas, values) {
  const { context, width, height } = scaleCanvas(canvas);
  if (values.length < 2 || !width) return;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (index) => 2 + (index / (values.length - 1)) * (width - 5);
  const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  context.strokeStyle = context.fillStyle = colour("accent");
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  context.beginPath();
  values.forEach((value, index) => context[index ? "lineTo" : "moveTo"](x(index), y(value)));
  context.stroke();
  dot(context, x(values.length - 1), y(values[values.length - 1]), 2);
}
