// A run's state, in a word and in a sentence; its events, and its trouble.
import { h, prose } from "./dom.js";
import { moment } from "./format.js";
import { toRun } from "./router.js";

const MEANING = {
  running: "It is training now.",
  starting: "It loads its model and has not begun to train.",
  finished: "It trained all its steps.",
  interrupted: "It was stopped and can be resumed.",
  failed: "It stopped because of an error.",
  crashed: "Its process is gone and wrote no end: killed, out of memory, or the machine stopped.",
};

const UNHEALTHY = ["collapsed", "diverged", "starved", "reward-hacked", "memorising"];

/** The state; green where it finished only if nothing speaks against it, `advisories` neither. */
export function statePill(state, health, advisories = 0) {
  const known = Object.hasOwn(MEANING, state);
  const shown = known && !(state === "finished" && (advisories || UNHEALTHY.includes(health?.verdict)));
  return h("span", { class: `pill ${shown ? state : ""}`, title: known ? MEANING[state] : null }, state);
}

/** Whether it learns, by its own metrics, with the figures behind it; metrics alone do not make it healthy where there
 * are `advisories`. */
export function healthPill(health, advisories = 0) {
  if (!health) return null;
  const { verdict, reason } = health;
  if (verdict === "healthy" && advisories) {
    return h("span", { class: "pill health warn", title: `${reason} But there is advice, which reads its rollouts too.` }, "see advice");
  }
  const colour = UNHEALTHY.includes(verdict) ? "bad" : { healthy: "good", "learning slowly": "warn" }[verdict] ?? "";
  return h("span", { class: `pill health ${colour}`, title: reason }, verdict);
}

export function meaning(state) {
  return MEANING[state] ?? "";
}

/** What a reader must know before anything else: why it stopped, and what could not be read. */
export function troubles(run) {
  const { state, message, step } = run.status;
  const found = [];
  const { health } = run.standing;
  if (UNHEALTHY.includes(health?.verdict)) {
    found.push(h("div", { class: "notice bad" }, h("h2", {}, `Health: ${health.verdict}`), h("p", {}, prose(health.reason))));
  }
  if (["failed", "crashed", "interrupted"].includes(state)) {
    found.push(h("div", { class: `notice ${state === "interrupted" ? "warn" : "bad"}` },
      h("h2", {}, `${state[0].toUpperCase()}${state.slice(1)} at step ${step ?? 0}`),
      h("p", {}, prose(message || meaning(state))),
      h("p", { class: "faint" }, "In a terminal, ", h("code", {}, `paceline doctor ${run.standing.path}`), " tells the same, and how to go on.")));
  }
  if (run.standing.problems.length) {
    found.push(h("div", { class: "notice warn" }, h("h2", {}, "Not all of it could be read"),
      h("ul", {}, run.standing.problems.map((problem) => h("li", {}, problem)))));
  }
  return found;
}

export function eventsTable(run) {
  const { events, events_left_out: left } = run.standing;
  if (!events.length) return null;
  const rows = [...events].reverse().map((event) => h("tr", { class: kind(event) },
    h("td", { class: "soft" }, moment(event.time)), h("td", {}, String(event.event ?? "")), h("td", {}, sentence(event))));
  return [
    h("h2", {}, "Events", left ? h("span", { class: "faint" }, `the last ${events.length}; ${left} earlier ones are in events.jsonl`) : null),
    h("div", { class: "events", tabindex: 0, role: "region", "aria-label": "Events, newest first" },
      h("table", {}, h("thead", {}, h("tr", {}, ["Time", "Event", "What"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)))];
}

function kind({ event, status }) {
  if (event === "end" && status === "failed") return "bad";
  return event === "note" ? "note" : null;
}

function sentence(event) {
  const known = {
    begin: () => `${event.start_step ? `goes on from step ${event.start_step}` : "starts"}, ${event.total_steps ?? "?"} steps on ${event.device ?? "?"}`,
    end: () => `${event.status} at step ${event.step}${event.message ? `: ${event.message}` : ""}`,
    roll_back: () => `back to step ${event.step}`,
  };
  if (Object.hasOwn(known, event.event)) return known[event.event]();
  if (event.text !== undefined) return String(event.text);
  const { time, event: _, ...rest } = event;
  return JSON.stringify(rest);
}
