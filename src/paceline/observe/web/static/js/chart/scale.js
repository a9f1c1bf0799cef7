// From values to pixels: domains, ticks, and few enough points to draw.

/** Round numbers that cut [low, high] into about `wanted` parts. */
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let index = 0; index < 100 && (first + index) * step <= high + step * 1e-9; index += 1) found.push((first + index) * step);
  return found.map((value) => (Math.abs(value) < step * 1e-9 ? 0 : Number(value.toPrecision(12))));
}

/** Whole powers of ten between two positive values; with 2 and 5 between them where there are few. */
export function logTicks(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const skip = Math.max(1, Math.ceil((last - first) / 6));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  for (let power = first; power <= last; power += skip) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length ? found : [low, high];
}

/** A little air around the values; a constant gets a domain of its own size. */
export function paddedRange(low, high, { min, max, span = 1 } = {}) {
  if (!Number.isFinite(low)) [low, high] = [min ?? 0, max ?? 1];
  if (min !== undefined) low = Math.min(low, min);
  if (max !== undefined) high = Math.max(high, max);
  // What differs only by rounding is constant.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const room = Math.abs(low) * 0.1 || span;
    [low, high] = [low === min ? low : low - room, high === max ? high : high + room];
  }
  const room = (high - low) * 0.06;
  return [low === min ? low : low - room, high === max ? high : high + room];
}

/** Index of the first x that is not below `value`; xs ascend. */
export function firstAt(xs, value) {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Index of the nearest x, or -1 where there is none. */
export function nearest(xs, value) {
  if (!xs.length) return -1;
  const right = firstAt(xs, value);
  if (right === 0) return 0;
  if (right === xs.length) return right - 1;
  return value - xs[right - 1] <= xs[right] - value ? right - 1 : right;
}

/**
 * The points of [from, to) for a plot of `columns` pixels. Where there are more than two for a pixel, each pixel keeps
 * its first, lowest, highest and last point: the line looks the same, and no spike is lost.
 */
export function thin(xs, ys, from, to, toColumn, columns) {
  if (to - from <= 3 * columns) {
    const all = [];
    for (let index = from; index < to; index += 1) all.push(index);
    return all;
  }
  const kept = [];
  let index = from;
  while (index < to) {
    const column = Math.floor(toColumn(xs[index]));
    const first = index;
    let low = index;
    let high = index;
    while (index < to && Math.floor(toColumn(xs[index])) === column) {
      if (ys[index] < ys[low]) low = index;
      if (ys[index] > ys[high]) high = index;
      index += 1;
    }
    for (const one of [...new Set([first, low, high, index - 1])].sort((a, b) => a - b)) kept.push(one);
  }
  return kept;
}

const done = new WeakMap(); // The last smoothing of each curve: the pointer asks for it at every move.

/**
 * Exponential smoothing by `weight` (0 none, towards 1 more). The first values are divided by the weight they have had so
 * far, so that the curve does not start at zero.
 */
export function smoothed(ys, weight) {
  if (!weight) return ys;
  const kept = done.get(ys);
  if (kept?.weight === weight && kept.out.length === ys.length) return kept.out;
  const out = new Array(ys.length);
  let mean = 0;
  let heaviness = 0;
  for (let index = 0; index < ys.length; index += 1) {
    mean = weight * mean + (1 - weight) * ys[index];
    heaviness = weight * heaviness + (1 - weight);
    out[index] = mean / heaviness;
  }
  done.set(ys, { weight, out });
  return out;
}

/** The values of a curve as they are shown. A held-out value is a measurement of its own and is never smoothed. */
export function shownValues({ ys, heldOut }, weight) {
  return heldOut ? ys : smoothed(ys, weight);
}
