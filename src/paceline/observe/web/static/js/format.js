// Numbers and times as people read them.

const LARGE = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** 0.612, 12.4, 842, 4.1k, 3.2e-5; a dash for what is missing. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
  if (Number.isInteger(value) && size < 1000) return minus(String(value));
  if (size < 10) return minus(value.toFixed(3));
  if (size < 1000) return minus(value.toFixed(size < 100 ? 2 : 1));
  return count(value);
}

/** 842, 4.1k, 135M: for things that are counted. */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, letter] of LARGE) {
    if (Math.abs(value) >= 0.9995 * size) {
      const scaled = value / size;
      return minus(Math.abs(scaled) >= 99.95 || Number.isInteger(scaled) ? scaled.toFixed(0) : scaled.toFixed(1)) + letter;
    }
  }
  return minus(Number.isInteger(value) ? String(value) : value.toFixed(1));
}

/** 4,000: a step, or whatever is numbered. */
export function whole(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return minus(String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ","));
}

export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const hundred = value * 100;
  const digits = Math.abs(hundred) < 9.95 && Math.abs(hundred - Math.round(hundred)) > 0.04 ? 1 : 0;
  return `${minus(hundred.toFixed(digits))} %`;
}

/** +0.372 */
export function change(first, last) {
  const text = (last - first).toFixed(3);
  return Number(text) === 0 ? "±0" : (last > first ? "+" : "") + minus(text);
}

/** 0.31 s, 21 s, 4 min 10 s, 3 h 05 min, 2 d 4 h */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  const whole = Math.round(value);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h ${pad(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** just now, 4 min ago, 3 h ago, 2 d ago */
export function age(time, now = Date.now() / 1000) {
  if (!time) return "–";
  const passed = Math.max(0, now - time);
  if (passed < 10) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129_600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86_400)} d ago`;
}

/** 2026-03-04 12:05:09, in the reader's own zone. */
export function moment(time) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${clock(time)}`;
}

/** 12:05:09 */
export function clock(time) {
  const date = new Date(time * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(pad).join(":");
}

/** 1 run, 2 runs */
export function amount(value, unit) {
  return `${count(value)} ${unit}${value === 1 ? "" : "s"}`;
}

function minus(text) {
  return text.replace("-", "−");
}

function pad(value) {
  return String(value).padStart(2, "0");
}
