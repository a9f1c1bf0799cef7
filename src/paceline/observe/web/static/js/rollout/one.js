// One rollout: what was said, what it earned, and its neighbours in the list it was found in.
import { ask } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { amount, moment, number, whole } from "../format.js";
import { toRun } from "../router.js";
import * as episode from "./episode.js";
import * as group from "./group.js";
import { FINISH, PAGE, queryOf, stateMark, stateMeaning, toList, toOne, versionWords } from "./words.js";
import { conversations } from "./talk.js";

export async function render(root, run, params) {
  const query = queryOf(params);
  const id = Number(params.get("id"));
  const view = params.get("view");
  const told = await ask("rollouts/one", { run: run.name, id, ...query });
  const { row, beside } = told;
  const place = h("div");
  fill(root, h("div", { class: "stack" },
    h("div", {},
      h("div", { class: "head" }, h("h1", {}, `Rollout ${whole(row.index)}`), stateMark(row.state),
        h("span", { class: "soft" }, [row.env, row.actor !== "policy" ? row.actor : "", row.kind, `step ${whole(row.step)}`].filter(Boolean).join(" · ")),
        h("span", { class: "grow" }), neighbours(run, beside, query, view)),
      views(run, told, query, view)),
    place));
  if (view === "group") fill(place, await group.content(run, row, query));
  else if (view === "episode") fill(place, await episode.content(run, row, query));
  else {
    fill(place, h("div", { class: "rollout" },
      h("div", { class: "talks" }, row.whole ? conversations(told.talks) : h("div", { class: "empty" }, h("h2", {}, "Its words were not kept"),
        h("p", {}, "The record fell behind the run at this point and kept the figures alone."))),
      h("aside", { "aria-label": "What is known of it" }, facts(run, told, query))));
  }
  announce(`Rollout ${whole(row.index)}, reward ${number(told.reward)}`, true);
  return keys(run, beside, query, view);
}

function neighbours(run, beside, query, view) {
  const list = beside ? Math.floor(beside.place / PAGE) + 1 : 1;
  const step = (id, label, key) => (id === null || id === undefined
    ? h("span", { class: "faint" }, label)
    : h("a", { href: toOne(run, id, query, view), "aria-keyshortcuts": key }, label, " ", h("kbd", {}, key)));
  return h("nav", { class: "row", "aria-label": "Neighbours in the list" },
    beside && step(beside.before, "Previous", "k"),
    h("a", { href: toList(run, query, list) }, beside ? `${whole(beside.place + 1)} of ${whole(beside.total)} in the list` : "The list, where it is not"),
    beside && step(beside.after, "Next", "j"));
}

function views(run, { row, tries, seats, kept }, query, view) {
  const link = (name, label) => h("a", { href: toOne(run, row.index, query, name), "aria-current": (view ?? "") === (name ?? "") ? "page" : null }, label);
  return h("nav", { class: "views", "aria-label": "Views of this rollout" },
    link(null, "Conversation"),
    tries > 1 && link("group", `Group of ${tries}`),
    (seats > 1 || row.actor !== "policy") && link("episode", `Episode, ${amount(seats, "seat")}`),
    kept && row.turns > 0 && h("a", { href: toRun(run.name, "tokens", { id: row.index, ...(query.stream ? { stream: query.stream } : {}) }) }, "Tokens"),
    h("a", { href: toRun(run.name, "tickets", { ticket: row.ticket }) }, `Ticket ${whole(row.ticket)}`));
}

function facts(run, told, query) {
  const { row, metrics, verdicts, error, parent } = told;
  const known = [
    ["Reward", number(told.reward)], ["Advantage", number(row.advantage), "mean over the tokens that train"],
    ["Became", stateMeaning(row.state) || row.state], ["Environment", row.env], ["Actor", row.actor], ["Kind of episode", row.kind], ["Started by", parent],
    ["Played for", row.domain], ["Step", whole(row.step)], ["Version", versionWords(row), "of the policy that said it"], ["Tokens", `${whole(row.tokens)} sampled, ${whole(row.prompt)} in the first prompt`],
    ["Turns", whole(row.turns)], ["Ended", FINISH[row.finish] ?? row.finish], ["Row of the data", whole(row.row)], ["Try", whole(row.member)], ["Time", row.time ? moment(row.time) : ""],
  ];
  const measured = Object.entries(metrics);
  return [
    error !== null && h("div", { class: "notice bad" }, h("h2", {}, "Error"), h("pre", {}, error)),
    h("dl", { class: "facts" }, known.filter(([, value]) => value !== "" && value !== undefined).map(([name, value, more]) =>
      h("div", {}, h("dt", { title: more ?? null }, name), h("dd", {}, value)))),
    verdicts.length ? [h("h2", {}, "Rubric"), verdicts.map(verdict)] : null,
    measured.length ? [h("h2", {}, "Metrics"), h("dl", { class: "facts" }, measured.map(([name, value]) =>
      h("div", {}, h("dt", { class: "mono" }, name), h("dd", {}, typeof value === "number" ? number(value) : String(value)))))] : null,
    h("p", {}, h("a", { href: toList(run, { ...query, ticket: row.ticket, env: row.env }) }, "All rollouts of this ticket")),
  ];
}

/** A part of the reward: the environment's own, or a judge's grade with its reasons. */
function verdict({ judge, score, weight, value, text, model, seconds, attempts, cached }) {
  const how = [`graded ${number(value)}`, model, cached ? "remembered" : `${number(seconds)} s`, attempts > 1 ? `${whole(attempts)} answers` : ""];
  return h("details", { class: "verdict" },
    h("summary", {}, h("span", { class: "mono" }, judge), ` ${number(weight)} × ${number(score)}`),
    h("p", { class: "soft" }, model ? how.filter(Boolean).join(" · ") : "the environment's own reward"),
    text ? h("pre", {}, text) : null);
}

/** j and k go on and back in the list, unless one is writing. */
function keys(run, beside, query, view) {
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, textarea, select")) return;
    const to = { j: beside?.after, k: beside?.before }[event.key];
    if (to !== undefined && to !== null) location.hash = toOne(run, to, query, view);
  };
  addEventListener("keydown", pressed);
  return () => removeEventListener("keydown", pressed);
}
