// The fate of a rollout, in words.
import { h } from "../dom.js";

const MEANING = {
  trained: "It trained in this step.",
  replayed: "It trained once more in this step.",
  skipped: "Its step was bad and was left out.",
  evaluated: "Played on a held-out row to see how good the policy is; it never trains.",
  matched: "A game for the ratings of the league; it never trains.",
  failed: "It broke; its error says why.",
  "dropped:environment": "The environment gave it up on purpose.",
  "dropped:no_sample": "Nothing of it was left to train on.",
  "dropped:zero_advantage": "All tries of its group earned the same, so there was nothing to learn from them.",
  "dropped:group_too_small": "Too few tries of its group were left to compare.",
  "dropped:stale": "It was sampled from weights older than `staleness` allows.",
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

/** Versions of the policy that said it: 4, or 4 to 6. */
export function versionWords({ version_min: low, version_max: high }) {
  if (low < 0) return "–";
  return low === high ? String(low) : `${low} to ${high}`;
}

export const FINISH = { stop: "ended by itself", length: "cut at the longest length" };
