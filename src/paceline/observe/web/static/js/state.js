// A run's state, in a word and in a sentence.
import { h } from "./dom.js";

const MEANING = {
  running: "It is training now.",
  starting: "It loads its model and has not begun to train.",
  finished: "It trained all its steps.",
  interrupted: "It was stopped and can be resumed.",
  failed: "It stopped because of an error.",
  crashed: "Its process is gone and wrote no end: killed, out of memory, or the machine stopped.",
};

export function statePill(state) {
  const known = Object.hasOwn(MEANING, state);
  return h("span", { class: `pill ${known ? state : ""}`, title: known ? MEANING[state] : null }, state);
}

export function meaning(state) {
  return MEANING[state] ?? "";
}
