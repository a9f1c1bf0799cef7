// Runs that differ only in their seed, and their curves as one.
import { nearest } from "./chart/scale.js";

/** Runs by experiment: [{label, runs}], in the order of their first run. */
export function families(runs) {
  const found = new Map();
  for (const run of runs) {
    const key = run.family || run.name;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(run);
  }
  return [...found.values()].map((group) => ({ label: group.length > 1 ? shared(group.map(({ name }) => name)) : group[0].name, runs: group }));
}

/** What the names have in common at their beginning, without a dangling separator; the first name where that is nothing. */
function shared(names) {
  let common = names[0];
  for (const name of names) while (!name.startsWith(common)) common = common.slice(0, -1);
  return common.replace(/[-_. ]*(?:seed|s)?[-_. ]*$/i, "") || names[0];
}

/** Mean, lowest and highest of several curves, at each place where all that reach so far have a point. */
export function joinCurves(curves, axis) {
  if (curves.length === 1) return curves[0];
  const { heldOut } = curves[0];
  if (axis === "time") return { ...joinByTime(curves), heldOut };
  const at = new Map();
  for (const { xs, ys } of curves) {
    xs.forEach((x, index) => {
      if (!at.has(x)) at.set(x, []);
      at.get(x).push(ys[index]);
    });
  }
  const xs = [...at.keys()].sort((a, b) => a - b);
  return { ...meanAndRange(xs, xs.map((x) => at.get(x))), heldOut };
}

/** Clocks never agree, so the curve with the most points says where, and the others answer with their nearest. */
function joinByTime(curves) {
  const { xs } = curves.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
  return meanAndRange(xs, xs.map((x) => curves.filter((one) => x <= one.xs.at(-1)).map((one) => one.ys[nearest(one.xs, x)])));
}

function meanAndRange(xs, values) {
  return {
    xs,
    ys: values.map((all) => all.reduce((a, b) => a + b, 0) / all.length),
    low: values.map((all) => Math.min(...all)),
    high: values.map((all) => Math.max(...all)),
  };
}
