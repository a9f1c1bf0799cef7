// Runs of one group, such as those that differ only in their seed, and their curves as one.
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

/** Runs by the value of a key of their run files, which `tables` has by the name of a run. */
export function groupsByKey(runs, tables, key) {
  const found = new Map();
  for (const run of runs) {
    const value = tables.get(run.name)?.get(key);
    const label = `${key} = ${value === undefined ? "–" : value.replace(/^"|"$/g, "")}`;
    if (!found.has(label)) found.set(label, []);
    found.get(label).push(run);
  }
  return [...found].map(([label, group]) => ({ label, runs: group }));
}

/** What the names have in common at their beginning, without a dangling separator; the first name where that is nothing. */
function shared(names) {
  let common = names[0];
  for (const name of names) while (!name.startsWith(common)) common = common.slice(0, -1);
  return common.replace(/[-_. ]*(?:seed|s)?[-_. ]*$/i, "") || names[0];
}

/** The mean of several curves and its interval, at each place over all that reach so far. */
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
  return { ...meanAndInterval(xs, xs.map((x) => at.get(x))), heldOut };
}

/** Clocks never agree, so the curve with the most points says where, and the others answer with their nearest. */
function joinByTime(curves) {
  const { xs } = curves.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
  return meanAndInterval(xs, xs.map((x) => curves.filter((one) => x <= one.xs.at(-1)).map((one) => one.ys[nearest(one.xs, x)])));
}

/** Student's t at 97.5 % by degrees of freedom, from 1. */
const STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086];

/**
 * The 95 % interval of the mean. Of two values that is six times their distance either way and says nothing, so there it is
 * from the lower to the higher.
 */
function meanAndInterval(xs, values) {
  const means = values.map((all) => all.reduce((a, b) => a + b, 0) / all.length);
  const radii = values.map((all, at) => {
    if (all.length < 3) return (Math.max(...all) - Math.min(...all)) / 2;
    const variance = all.reduce((sum, value) => sum + (value - means[at]) ** 2, 0) / (all.length - 1);
    return (STUDENT[all.length - 2] ?? 1.96) * Math.sqrt(variance / all.length);
  });
  return { xs, ys: means, low: means.map((mean, at) => mean - radii[at]), high: means.map((mean, at) => mean + radii[at]) };
}
