// Keys that lead through the tokens.
import { componentsOf } from "./streams.js";
import { versionsBefore } from "./strip.js";

/** The keys, as the page lists them. */
export const KEYS = [
  ["← →", "a token back, on"], ["↑ ↓", "a line up, down"], ["Home End", "first, last"],
  ["n", "next token that trains (Shift: the one before)"], ["p", "next by size of the value, the largest first (Shift: back)"], ["v", "next change of version"],
];

/** Answers keys of a strip: `go(at)` is called with the token to choose, `stream()` gives the one that is shown. */
export function walk(strip, stream, go) {
  const { told } = strip;
  const trains = told.ids.map((_, at) => componentsOf(told, at).length > 0);
  const bounds = [...versionsBefore(told).keys()];
  let peaks = { stream: null, order: [] };
  const last = told.ids.length - 1;

  const seek = (from, by) => {
    for (let at = from + by; at >= 0 && at <= last; at += by) if (trains[at]) return at;
    return null;
  };
  const peak = (here, by) => {
    const now = stream();
    if (peaks.stream !== now) {
      const values = now.values ?? [];
      const known = values.map((value, at) => [at, Math.abs((value ?? now.centre ?? 0) - (now.centre ?? 0))]).filter(([, size]) => size > 0);
      peaks = { stream: now, order: known.sort((one, other) => other[1] - one[1] || one[0] - other[0]).map(([at]) => at) };
    }
    const place = peaks.order.indexOf(here);
    if (place < 0) return peaks.order[0] ?? null;
    return peaks.order[Math.max(0, Math.min(peaks.order.length - 1, place + by))];
  };

  strip.element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const here = strip.chosen ?? 0;
    const back = event.shiftKey;
    const to = {
      ArrowLeft: () => here - 1, ArrowRight: () => here + 1, Home: () => 0, End: () => last,
      ArrowUp: () => line(strip, here, -1), ArrowDown: () => line(strip, here, 1),
      n: () => seek(here, back ? -1 : 1), p: () => peak(here, back ? -1 : 1), v: () => bounds.find((at) => at > here) ?? bounds[0],
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    if (to !== null) go(Math.max(0, Math.min(last, to)));
  });
}

/** The token nearest below or above: chips of one line end at the same height. */
function line(strip, here, by) {
  const box = strip.chip(here).getBoundingClientRect();
  let best = null;
  let bottom = null;
  for (let at = here + by; at >= 0 && at < strip.chips.length; at += by) {
    const other = strip.chip(at).getBoundingClientRect();
    if (Math.abs(other.bottom - box.bottom) < 2) continue;
    bottom ??= other.bottom;
    if (Math.abs(other.bottom - bottom) >= 2) break;
    const apart = Math.abs(other.left - box.left);
    if (best === null || apart < best.apart) best = { at, apart };
  }
  return best?.at ?? here;
}
