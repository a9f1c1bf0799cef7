// Rollouts in words and in addresses: the fate of one, and the query of the page, kept in the address so that it can be shared.
import { h } from "../dom.js";
import { number } from "../format.js";
import { toRun } from "../router.js";

const MEANING = {
  trained: "It trained in this step.",
  replayed: "It trained once more in this step.",
  skipped: "Its step was bad and was left out.",
  evaluated: "Played on a held-out row to see how good the policy is; it never trains.",
  matched: "A game for the ratings of the league; it never trains.",
  failed: "The episode failed; see its error.",
  "dropped:environment": "The environment gave it up on purpose.",
  "dropped:no_sample": "Nothing of it was left to train on.",
  "dropped:zero_advantage": "All tries of its group earned the same, so there was nothing to learn from them.",
  "dropped:group_too_small": "Too few tries of its group were left to compare.",
  "dropped:stale": "It was sampled from weights older than `staleness` allows.",
  "dropped:run_ended": "The run ended while its group was being judged.",
  "dropped:oversampled": "Other groups were ready first and filled the batch.",
};
const COLOURS = { trained: "good", replayed: "good", evaluated: "seen", matched: "seen", failed: "bad" };

/** dropped:zero_advantage as "dropped: zero advantage" */
export function stateWords(state) {
  return state.replace(":", ": ").replaceAll("_", " ");
}

export function stateMeaning(state) {
  return Object.hasOwn(MEANING, state) ? MEANING[state] : "";
}

export function stateMark(state) {
  const colour = Object.hasOwn(COLOURS, state) ? COLOURS[state] : "warn";
  return h("span", { class: `fate ${colour}`, title: stateMeaning(state) || null }, stateWords(state) || "unknown");
}

/** What the environment and judges measured, as names and numbers; grades, which are parts of the reward, come first. */
export function measured(metrics) {
  const isGrade = (name) => name === "task_reward" || name.startsWith("judge/");
  return Object.entries(metrics ?? {}).sort(([one], [other]) => isGrade(other) - isGrade(one))
    .map(([name, value]) => [name, typeof value === "number" ? number(value) : String(value)]);
}

/** Versions of the policy that sampled it: 4, or 4 to 6. */
export function versionWords({ version_min: low, version_max: high }) {
  if (low < 0) return "–";
  return low === high ? String(low) : `${low} to ${high}`;
}

export const FINISH = { stop: "ended by itself", length: "cut at the longest length" };

/** Names as the server knows them; the page of the list comes besides. */
const FILTERS = ["env", "actor", "state", "finish", "error", "domain", "step_from", "step_to", "reward_from", "reward_to",
  "length_from", "length_to", "ticket", "row", "text"];
/** Besides filters: the order of the list, whether texts are raw, and by which stream tokens are coloured, kept for the way back. */
const FIELDS = [...FILTERS, "sort", "shown", "stream"];
export const PAGE = 50;

/** The query of an address: only what is set. */
export function queryOf(params) {
  return Object.fromEntries(FIELDS.map((name) => [name, params.get(name)]).filter(([, value]) => value));
}

export function pageOf(params) {
  const page = Number.parseInt(params.get("page"), 10);
  return page > 1 ? page : 1;
}

/** The address of a page of the list. */
export function toList(run, query, page = 1) {
  return toRun(run.name, "rollouts", { ...query, ...(page > 1 ? { page } : {}) });
}

/** The address of one rollout, found by this query; `view` is `group`, `episode` or nothing for what was said. */
export function toOne(run, id, query, view = null) {
  return toRun(run.name, "rollouts", { id, ...(view ? { view } : {}), ...query });
}

export function isFiltered(query) {
  return Object.keys(query).some((name) => FILTERS.includes(name));
}

/** The same query without its filters. */
export function unfiltered(query) {
  return Object.fromEntries(Object.entries(query).filter(([name]) => !FILTERS.includes(name)));
}

/** The link that shows texts as they were written, or what they draw. */
export function otherText(run, row, query, view) {
  const { shown, ...rest } = query;
  return shown === "raw" ? h("a", { href: toOne(run, row.index, rest, view) }, "Rendered text")
    : h("a", { href: toOne(run, row.index, { ...query, shown: "raw" }, view) }, "Raw text");
}
