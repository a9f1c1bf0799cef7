// Which metrics are shown together, under which title. What no entry here takes is shown too, at the end.
import { count, number, percent, seconds } from "./format.js";

const words = (name) => name.replaceAll("_", " ");

/**
 * `match` gives the label of a metric's curve, or nothing where the metric belongs elsewhere. The first entry that takes a
 * metric has it. `env` in a pattern is an environment, which keeps its colour in all charts.
 */
export const CHARTS = [
  entry("reward", "Learning", "Reward", "mean of what was sampled, before filters", /^reward\/(?<env>.+)\/mean$/, { lead: true, unit: "reward" }),
  entry("eval", "Learning", "Held-out evaluation", "on rows that never train; exact and pass are shares", /^eval\/(?<env>.+)\/(?<what>reward|exact|pass@\d+)$/, { lead: true, unit: "reward or share" }),
  entry("loss", "Update", "Loss by component", "each with its own normaliser", /^loss(?:\/(?<what>.+))?$/, { whole: "sum", broad: true }),
  entry("grad", "Update", "Gradient norm", "before clipping", /^(?<what>grad_norm.*)$/, { min: 0 }),
  entry("entropy", "Update", "Entropy", "a fall towards 0 is a collapse", /^(?<what>entropy.*)$/, { min: 0, unit: "nats a token" }),
  entry("kl", "Update", "KL and mismatch", "how far trainer and sampler are apart", /^(?<what>ppo_kl|sampler_kl|teacher_kl|ref_kl|mismatch_kl|mismatch\/(?!mask$|template$).+|kl.*)$/, { unit: "nats a token" }),
  entry("clip", "Update", "Clipped tokens", "held back by a bound of the loss", /^(?<what>(?:teacher_kl\/)?clip_fraction.*)$/, { format: percent, min: 0, span: 0.05, unit: "share of trained tokens" }),
  entry("ratio", "Update", "Importance ratio", "1 where nothing has changed since sampling", /^(?<what>ratio.*)$/, { unit: "ratio of probabilities" }),
  entry("cut", "Update", "Mismatch known before training", "tokens the mask cut, turns the template changed", /^mismatch\/(?<what>mask|template)$/, { format: percent, min: 0, span: 0.05, unit: "share" }),
  entry("lr", "Update", "Learning rate", "of the optimizer", /^(?<what>lr.*)$/, { min: 0 }),
  entry("metric", "Rollouts", "Environment metrics", "mean of what each environment measures, in its own units", /^metric\/(?<env>[^/]+)\/(?<what>.+)$/),
  entry("length", "Rollouts", "Length", "sampled, and with the prompt", /^(?<what>length|trajectory_length|stale_length)$/, { min: 0, unit: "tokens" }),
  entry("spread", "Rollouts", "Spread of rewards", "standard deviation in a batch", /^reward\/(?<env>[^/]+)\/std$/, { min: 0, unit: "reward" }),
  entry("eval_length", "Rollouts", "Held-out length", "sampled in evaluation", /^eval\/(?<env>.+)\/length$/, { min: 0, unit: "tokens" }),
  entry("truncated", "Rollouts", "Truncated", "ran into max_tokens", /^(?:(?<what>truncated_ratio)|eval\/(?<env>.+)\/truncated_ratio)$/, { format: percent, min: 0, span: 0.05, unit: "share of rollouts", whole: "held-out", names: { truncated_ratio: "training" } }),
  entry("turns", "Rollouts", "Turns", "", /^(?<what>turns)$/, { min: 0, unit: "engine calls a rollout" }),
  entry("dropped", "Rollouts", "Dropped, by reason", "", /^dropped\/(?<what>.+)$/, { unit: "groups and samples a step", stacked: true, format: count, busy: true, broad: true }),
  entry("drop_ratio", "Rollouts", "Dropped groups", "", /^(?<what>drop_ratio)$/, { format: percent, min: 0, span: 0.05, unit: "share of all groups" }),
  entry("staleness", "Pace", "Staleness", "between sampling and training", /^staleness\/(?<what>.+)$/, { min: 0, unit: "versions" }),
  entry("throughput", "Pace", "Throughput", "sampled and trained", /^(?<what>tokens\/s|train_tokens\/s)$/, { format: count, min: 0, unit: "tokens/s" }),
  entry("busy", "Pace", "Busy and waiting", "", /^(?:busy\/(?<what>.+)|wait_time_ratio|overlap_ratio)$/, {
    unit: "share of the step", format: percent, min: 0, max: 1, names: { wait_time_ratio: "trainer waits", device: "GPU", overlap_ratio: "both at once" },
  }),
  entry("engine", "Pace", "Engine", "requests decoded at once; what waits, and what gave up its place", /^engine\/(?<what>batch|waiting|preempted)$/, { min: 0, unit: "requests" }),
  entry("engine_cache", "Pace", "Engine's KV cache", "in use at the end of a step; prompt tokens shared, not computed", /^engine\/(?<what>cache_used|shared_prompts)$/, { format: percent, min: 0, max: 1, unit: "share" }),
  entry("memory", "Pace", "Memory", "the trainer's peak; of a device, what all processes hold", /^memory\/(?<what>.+)$/, { unit: "bytes", format: count, min: 0 }),
  entry("time", "Pace", "Time of a step, by part", "", /^time\/(?<what>(?!step$).+)$/, {
    unit: "seconds", stacked: true, format: seconds, busy: true, colours: { sample: 2, score: 5, train: 0, publish: 1, eval: 3 },
  }),
];
/** What is shown under "Other metrics", by the first part of the name; a family that is not here has its own name as title. */
const OTHER = {
  batch: { title: "Size of a batch", hint: "rollouts, samples and tokens" },
  critic: { title: "Critic" },
  curriculum: { title: "Curriculum" },
  data: { title: "Rows of the data", unit: "rows", format: count },
  eval: { title: "Other held-out measures" },
  failed: { title: "Failed episodes, by kind", unit: "episodes", format: count },
  league: { title: "League" },
  length: { title: "Length penalty" },
  micro_batches: { title: "Micro-batches", format: count },
  mixture: { title: "Mixture of the data", hint: "share of the draws, and their mean reward" },
  nll: { title: "Negative log likelihood", unit: "nats a token" },
  optimizer_steps: { title: "Optimizer steps", unit: "steps", format: count },
  promotion: { title: "Promotion" },
  replay: { title: "Replayed groups" },
  retried: { title: "Retried episodes, by kind", unit: "episodes", format: count },
  reward: { title: "Other rewards", unit: "reward" },
  reward_trained: { title: "Reward of what trained", unit: "reward" },
  sampling: { title: "Sampling" },
  time: { title: "Time of a step", unit: "seconds", format: seconds },
  skipped_samples: { title: "Skipped samples", unit: "samples", format: count },
};
export const SECTIONS = ["Learning", "Update", "Rollouts", "Pace"];

const NOT_CURVES = new Set(["step", "time"]);

function entry(id, section, title, hint, pattern, options = {}) {
  return { id, section, title, hint, pattern, unit: "", format: number, ...options };
}

/** Which curves each chart has, for these metric names: [{chart, curves: [{name, label, env}]}]; the rest comes last. */
export function arrange(names) {
  const charts = new Map(CHARTS.map((chart) => [chart.id, { chart, curves: [] }]));
  for (const name of names) {
    if (NOT_CURVES.has(name)) continue;
    const chart = CHARTS.find((one) => one.pattern.test(name));
    if (chart) charts.get(chart.id).curves.push({ name, ...withLabels(chart, name) });
    else other(charts, name);
  }
  const found = [...charts.values()].filter(({ curves }) => curves.length);
  for (const { chart, curves } of found) {
    if (chart.colours) curves.sort((a, b) => place(chart, a) - place(chart, b));
    shorten(chart, curves);
  }
  return found;
}

/**
 * The user's own among these metrics, sorted by prefix: [{prefix, name}]. They are what environments measure, and every key
 * that neither a chart nor a family of Paceline's takes.
 */
export function ownMetrics(names) {
  const isOwn = (name) => !NOT_CURVES.has(name) && (CHARTS.find((one) => one.pattern.test(name))?.id ?? (Object.hasOwn(OTHER, name.split("/")[0]) ? "" : "metric")) === "metric";
  const prefixOf = (name) => name.slice(0, Math.max(0, name.lastIndexOf("/")));
  const own = names.filter(isOwn).map((name) => ({ prefix: prefixOf(name), name }));
  return own.sort((a, b) => (a.prefix === b.prefix ? (a.name < b.name ? -1 : 1) : a.prefix < b.prefix ? -1 : 1));
}

function withLabels(chart, name) {
  const { env, what } = chart.pattern.exec(name).groups ?? {};
  return { env, what: chart.names?.[name] ?? (what ? words(what) : chart.whole ?? "") };
}

/** Parts with a colour of their own stand in the order they are named; others come behind. */
function place(chart, { what }) {
  const at = Object.keys(chart.colours).indexOf(what);
  return at < 0 ? 99 : at;
}

/**
 * One environment needs no name on each curve; what is measured always has one. Where both differ, colour tells the
 * environment and dashes the measure.
 */
function shorten(chart, curves) {
  const envs = new Set(curves.map((curve) => curve.env));
  const whats = new Set(curves.map((curve) => curve.what));
  for (const curve of curves) {
    const parts = [];
    if (curve.env && (envs.size > 1 || !curve.what)) parts.push(curve.env);
    if (curve.what) parts.push(curve.what);
    curve.label = parts.join(" · ") || curve.name;
    curve.dash = envs.size > 1 && whats.size > 1 ? [...whats].indexOf(curve.what) : 0;
    curve.byEnv = Boolean(curve.env) && (envs.size > 1 || whats.size === 1);
  }
  const seen = new Set();
  for (const curve of curves) {
    if (seen.has(curve.label)) curve.label = curve.name;
    seen.add(curve.label);
  }
}

function other(charts, name) {
  const family = name.split("/")[0];
  const id = `other/${family}`;
  if (!charts.has(id)) {
    charts.set(id, { chart: entry(id, "Other", family, "", /^/, OTHER[family]), curves: [] });
  }
  charts.get(id).curves.push({ name, what: words(name.slice(family.length + 1)) || words(name) });
}

const whole = new WeakMap(); // Of each axis how many of its places were looked at, and whether they all ascend.

/** Whether an axis has no gap and never goes back. */
function isWhole(along) {
  let { length, fine } = whole.get(along) ?? { length: 0, fine: true };
  for (; fine && length < along.length; length += 1) {
    fine = along[length] !== null && along[length] !== undefined && !(length && along[length] < along[length - 1]);
  }
  whole.set(along, { length, fine });
  return fine;
}

/** The points of a metric on an axis ("step" or "time"), without gaps: {xs, ys, heldOut}. */
export function points(columns, name, axis) {
  const along = columns[axis] ?? [];
  const values = columns[name] ?? [];
  const start = axis === "time" ? along.find((value) => value !== null) ?? 0 : 0;
  let [xs, ys] = [[], []];
  const first = values.findIndex((value) => value !== null);
  if (first >= 0 && isWhole(along) && values.indexOf(null, first) < 0) { // as of most metrics: thousands of lines at once
    ys = values.slice(first);
    xs = along.slice(first, values.length);
    if (start) xs = xs.map((x) => x - start);
    return { xs, ys, heldOut: name.startsWith("eval/") };
  }
  let last = -Infinity;
  for (let index = 0; index < values.length; index += 1) {
    const [x, y] = [along[index], values[index]];
    if (x === null || y === null || x === undefined || x < last) continue;
    last = x;
    xs.push(x - start);
    ys.push(y);
  }
  return { xs, ys, heldOut: name.startsWith("eval/") };
}
