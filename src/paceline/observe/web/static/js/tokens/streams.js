// The streams that tokens can be coloured by: each with its values, its scale and what it means.
import { h } from "../dom.js";
import { count } from "../format.js";

const PARTS = ["rl", "ce", "teacher_kl"];
const PART_COLOURS = { rl: "--series-1", ce: "--series-2", teacher_kl: "--series-4", several: "--series-6" };
/** Nats at which a log probability has the strongest colour: the same in all rollouts, so that they can be compared. */
const STRONG_NATS = 5;
/** Ratios of 1.25 and 0.8, and beyond, may have the strongest colour; smaller differences never do. */
const LEAST_RATIO = Math.log(1.25);
/** The same for advantages and rewards: what is equal up to rounding stays pale. */
const LEAST_CREDIT = 1e-3;

/** All streams of a sequence, those first that a reader wants first. Those without values say in `missing` why. */
export function streams(data, again = null) {
  const { streams: kept, trained, rollout } = data;
  const sampled = kept.loss_mask;
  const on = (name) => kept[name] && data.ids.map((_, at) => (sampled[at] ? kept[name][at] : null));
  const weight = (name) => trained[name]?.some((value) => value) ? trained[name].map((value) => value || null) : null;
  const less = (one, other) => kept[one] && kept[other] && data.ids.map((_, at) => (sampled[at] ? kept[one][at] - kept[other][at] : null));
  const versions = on("versions")?.map((version) => (version >= 0 ? version : null));
  const found = [
    ramp("logprobs", "log probability", "as sampled, at the sampling temperature; strong is surprising, 0 is certain", on("logprobs"), "--series-2", { strong: STRONG_NATS }),
    diverging("advantages", "advantage", "how much better than its peers; what rl pushes up (+) or down (−)", on("advantages"), { least: LEAST_CREDIT }),
    ...PARTS.map((part) => ramp(`${part}_weights`, `${part} weight`, `how much a token counts in the ${part} component`, weight(part), PART_COLOURS[part])),
    parts(data),
    category("versions", "version", "the weights that sampled the token", versions, (version) => `version ${version}`),
    ramp("age", "age when trained", `versions between the one that sampled and the one that step ${rollout.step} began with`,
      rollout.domain === "training" && versions?.map((version) => (version === null ? null : rollout.step - 1 - version)), "--series-5"),
    category("loss_mask", "sampled", "whether the policy sampled it (the loss mask)", sampled.map(Number), (value) => (value ? "sampled by the policy" : "given to it")),
    diverging("pull", "teacher − sampler", "where a teacher finds the token likelier (+) or less likely (−)", less("teacher_logprobs", "logprobs"), { least: LEAST_RATIO }),
    ramp("teacher_logprobs", "teacher's log probability", "as the teacher scores it", on("teacher_logprobs"), "--series-4", { strong: STRONG_NATS }),
    diverging("from_base", "sampler − reference", "how far the sampler has gone from the KL reference", less("logprobs", "kl_ref_logprobs"), { least: LEAST_RATIO }),
    ramp("kl_ref_logprobs", "reference's log probability", "as the KL reference scores it", on("kl_ref_logprobs"), "--series-6", { strong: STRONG_NATS }),
    diverging("rewards", "reward on the token", "what the critic makes advantages of", on("rewards"), { least: LEAST_CREDIT }),
    ramp("log_z", "log Z", "what truncated sampling left of the distribution", on("log_z"), "--series-8"),
    ramp("temperatures", "temperature", "the sampling temperature", unlessConstant(on("temperatures")), "--series-7"),
  ].filter(Boolean);
  if (kept.trainer_logprobs) return [...found, ...recorded(kept), ...(again ? [shareOfLoss(again)] : [])].filter(Boolean);
  if (again) return [...found, ...computed(again)].filter(Boolean);
  const lost = "is the trainer's, and this record does not have it";
  return [...found, { key: "ratio", label: "ratio", missing: `The ratio ${lost}` }, { key: "entropy", label: "entropy", missing: `The entropy ${lost}` }];
}

/** What the trainer computed in the step's own forward pass. */
function recorded(kept) {
  return [
    diverging("ratio", "ratio", "how much likelier (above 1) or less likely the trainer found the token than the sampler did", kept.ratio, { least: LEAST_RATIO, ratio: true }),
    ramp("entropy", "entropy", "how undecided the trainer's policy was before the token, in nats", kept.entropy, "--series-8", { least: 1 }),
    ramp("trainer_logprobs", "trainer's log probability", "log π in the step's own forward pass", kept.trainer_logprobs, "--series-6", { strong: STRONG_NATS }),
    category("held", "clipped", "whether a bound of the loss held the token back", kept.clipped, (value) => (value ? "held back" : "free")),
    category("skipped", "left out", "whether the whole sample was left out (trainer.clip_skip_threshold)", unlessConstant(kept.skipped), (value) => (value ? "left out" : "trained")),
  ];
}

function shareOfLoss(again) {
  return diverging("share", "share of the loss, replayed", "what the token adds to the step's loss, all components together", again.share);
}

/** What a replay adds. */
function computed(again) {
  const held = again.ratio.map((value, at) => (value === null ? null : Number(again.rules.has(at))));
  return [
    diverging("ratio", "ratio, replayed", "how much likelier (above 1) or less likely the trainer found the token than the sampler did", again.ratio, { least: LEAST_RATIO, ratio: true }),
    category("held", "held back, replayed", "whether a bound of the loss left the token out or held it", held, (value) => (value ? "held back" : "free")),
    shareOfLoss(again),
    ramp("entropy", "entropy, replayed", "how undecided the trainer's policy was before the token", again.entropy, "--series-8", { least: 1 }),
    ramp("logprob", "trainer's log probability, replayed", "log π, as the step began", again.logprob, "--series-6", { strong: STRONG_NATS }),
  ];
}

/** How strong the colour of a token is, 0 to 1, and which colour: {tint, t}. */
export function colour(stream, at) {
  const value = stream.values[at];
  if (value === null || value === undefined || !Number.isFinite(value)) return { tint: "transparent", t: 0 };
  return stream.paint(value);
}

/** A value in words. */
export function streamText(stream, at) {
  const value = stream.values[at];
  if (value === null || value === undefined) return "–";
  return stream.name ? stream.name(value) : figure(value);
}

/** Four digits, so that a reader can check the sum. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const small = value !== 0 && Math.abs(value) < 1e-3;
  return (small ? value.toExponential(3) : String(Number(value.toPrecision(4)))).replaceAll("-", "−");
}

/** Which components train a token. */
export function componentsOf(data, at) {
  return PARTS.filter((part) => data.trained[part]?.[at]);
}

export function partColour(names) {
  return `var(${PART_COLOURS[names.length > 1 ? "several" : names[0]]})`;
}

/** From nothing to the `strong` end, the same in all rollouts, or to the largest value that there is, `least` at least. */
function ramp(key, label, meaning, values, tint, { strong = null, least = 0 } = {}) {
  const known = finite(values);
  if (!known.length) return null;
  const end = strong ?? largest(known, least);
  const sign = known.some((value) => value < 0) ? -1 : 1;
  return {
    key, label, meaning, values, kind: "ramp", ends: [0, sign * end], range: extremes(known),
    at: (share) => sign * end * share,
    paint: (value) => ({ tint: `var(${tint})`, t: Math.min(1, Math.abs(value) / end) }),
  };
}

/** Both ways from 0, equally far, to the value that is the farthest or `least` at least; a ratio from 1, by its logarithm. */
function diverging(key, label, meaning, values, { least = 0, ratio = false } = {}) {
  const known = finite(values);
  if (!known.length) return null;
  const distance = (value) => (ratio ? Math.log(value) : value);
  const value = (far) => (ratio ? Math.exp(far) : far);
  const centre = value(0);
  const end = largest(finite(known.map(distance)), least);
  return {
    key, label, meaning, values, centre, kind: "diverging", ends: [value(-end), value(end)], range: extremes(known),
    at: (share) => value(end * (2 * share - 1)),
    paint: (one) => ({ tint: one < centre ? "var(--series-2)" : "var(--series-1)", t: Math.min(1, Math.abs(distance(one)) / end) }),
  };
}

function category(key, label, meaning, values, name) {
  const known = [...new Set(finite(values))].sort((one, other) => one - other);
  if (!known.length) return null;
  return {
    key, label, meaning, values, name, kind: "category", cases: known,
    paint: (value) => ({ tint: `var(--series-${(known.indexOf(value) % 8) + 1})`, t: 0.7 }),
  };
}

/** By which components each token is trained, as a stream. */
function parts(data) {
  const names = data.ids.map((_, at) => componentsOf(data, at).join(" + "));
  const known = [...new Set(names)].filter(Boolean);
  if (!known.length) return null;
  return {
    key: "parts", label: "trained by", meaning: "the components of the loss that train the token", kind: "category",
    values: names.map((name) => (name ? known.indexOf(name) : null)), cases: known.map((_, place) => place), name: (place) => known[place],
    paint: (place) => ({ tint: partColour(known[place].split(" + ")), t: 0.7 }),
  };
}

function finite(values) {
  return values ? values.filter((value) => value !== null && value !== undefined && Number.isFinite(value)) : [];
}

/** A temperature that never changes colours nothing. */
function unlessConstant(values) {
  return new Set(finite(values)).size > 1 ? values : null;
}

/** The largest size, `least` at least; like `extremes` not by spreading: a sequence may be longer than a call's arguments. */
function largest(values, least) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), least) || 1;
}

function extremes(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

const SIGNS = { "\n": "↵", "\t": "⇥", "\r": "␍" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]|[^\S ]/gu;
const LONGEST = 200;

/** What a chip shows of a text. */
export function visible(text) {
  const shown = text.slice(0, LONGEST).replace(HIDDEN, (letter) => SIGNS[letter] ?? `⟨U+${code(letter)}⟩`);
  if (!shown) return "∅";
  if (/^ +$/.test(shown)) return "␣".repeat(shown.length);
  const begun = /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
  return text.length > LONGEST ? `${begun}…` : begun;
}

/** The same for one token of a sequence: {shown, kind}, where a kind says that the text itself is not there. */
export function piece(data, at) {
  const text = data.texts?.[at];
  if (text !== null && text !== undefined) return { shown: visible(text), kind: "" };
  const part = data.parts[at];
  return part ? { shown: part.bytes, kind: "bytes" } : { shown: `#${data.ids[at]}`, kind: "number" };
}

/** Whether the line ends with this token. */
export function breaks(data, at) {
  return data.texts?.[at]?.includes("\n") ?? false;
}

function code(letter) {
  return letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

const CELLS = 11;

/** The scale of a stream, and the smallest and the largest value that this sequence has. */
export function scale(stream) {
  if (stream.kind === "category") {
    return h("span", { class: "token-scale" }, stream.cases.slice(0, 24).map((value) => {
      const { tint, t } = stream.paint(value);
      return h("span", { class: "token-case" }, h("i", { class: "token-cell", vars: { "--tint": tint, "--t": t } }), stream.name(value));
    }), stream.cases.length > 24 ? `and ${stream.cases.length - 24} more` : null);
  }
  const [low, high] = stream.ends.map(figure);
  const [least, most] = stream.range.map(figure);
  const cells = Array.from({ length: CELLS }, (_, place) => stream.paint(stream.at(place / (CELLS - 1))));
  return [
    h("span", { class: "token-scale", role: "img", "aria-label": `Scale from ${low} to ${high}` },
      low, h("span", { class: "token-cells" }, cells.map(({ tint, t }) => h("i", { class: "token-cell", vars: { "--tint": tint, "--t": t } }))), high),
    h("span", { class: "token-range" }, least === most ? `here ${least}` : `here from ${least} to ${most}`)];
}

/** How many tokens each loss trains, and how others are drawn. */
export function lines(data, again) {
  const sums = new Map();
  let given = 0;
  let silent = 0;
  data.ids.forEach((_, at) => {
    const by = componentsOf(data, at);
    if (by.length) sums.set(by.join(" + "), (sums.get(by.join(" + ")) ?? 0) + 1);
    else if (data.streams.loss_mask[at]) silent += 1;
    else given += 1;
  });
  const held = data.streams.clipped?.filter((value) => value === 1).length ?? again?.rules.size;
  const tokens = (value) => `${count(value)} token${value === 1 ? "" : "s"}`;
  return h("span", { class: "token-scale" },
    [...sums].map(([name, value]) => h("span", { class: "token-case" },
      h("i", { class: "token-chip trains sign", vars: { "--by": partColour(name.split(" + ")) } }, "a"), `${data.trains ? "trained" : "would train"} by ${name}: ${tokens(value)}`)),
    silent ? h("span", { class: "token-case" }, h("i", { class: "token-chip silent sign" }, "a"), `sampled, not trained: ${tokens(silent)}`) : null,
    given ? h("span", { class: "token-case" }, h("i", { class: "token-chip given sign" }, "a"), `given, not trained: ${tokens(given)}`) : null,
    held ? h("span", { class: "token-case" }, h("i", { class: "token-chip held sign" }, "a"), `held back by a bound: ${tokens(held)}`) : null);
}
