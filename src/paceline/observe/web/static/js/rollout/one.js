// One rollout: its conversation, its reward and why, and its neighbours in the list it was found in.
import { ask } from "../api.js";
import { announce, fill, h } from "../dom.js";
import { amount, moment, number, seconds, whole } from "../format.js";
import { toRun } from "../router.js";
import * as episode from "./episode.js";
import * as group from "./group.js";
import { FINISH, measured, otherText, PAGE, queryOf, stateMark, stateMeaning, toList, toOne, versionWords } from "./words.js";
import { conversations, isRendered } from "./talk.js";

export async function render(root, run, params) {
  const query = queryOf(params);
  const id = Number(params.get("id"));
  const view = params.get("view");
  const data = await ask("rollouts/one", { run: run.name, id, ...query });
  const { row, beside } = data;
  const place = h("div");
  fill(root, h("div", { class: "stack" },
    h("div", {},
      h("div", { class: "head" }, h("h1", {}, `Rollout ${whole(row.index)}`), stateMark(row.state),
        h("span", { class: "soft" }, [row.env, row.actor !== "policy" ? row.actor : "", row.kind, `step ${whole(row.step)}`, `reward ${number(data.reward)}`].filter(Boolean).join(" · ")),
        h("span", { class: "grow" }), neighbours(run, beside, query, view)),
      views(run, data, query, view)),
    place));
  if (view === "group") fill(place, await group.content(run, row, query));
  else if (view === "episode") fill(place, await episode.content(run, row, query));
  else {
    fill(place, h("div", { class: "rollout" },
      h("div", { class: "talks" }, row.whole ? conversations(data.talks, query.shown === "raw") : h("div", { class: "empty" }, h("h2", {}, "No conversation recorded"),
        h("p", {}, "The record fell behind the run at this point and kept this rollout's figures alone."))),
      h("aside", { "aria-label": "Details" }, details(run, data, query))));
  }
  announce(`Rollout ${whole(row.index)}, reward ${number(data.reward)}`, true);
  return keys(run, beside, query, view);
}

function neighbours(run, beside, query, view) {
  const list = beside ? Math.floor(beside.place / PAGE) + 1 : 1;
  const step = (id, label, key) => (id === null || id === undefined
    ? h("span", { class: "faint" }, label)
    : h("a", { href: toOne(run, id, query, view), "aria-keyshortcuts": key }, label, " ", h("kbd", {}, key)));
  return h("nav", { class: "row", "aria-label": "Neighbours in the list" },
    beside && step(beside.before, "Previous", "k"),
    h("a", { href: toList(run, query, list) }, beside ? `${whole(beside.place + 1)} of ${whole(beside.total)} in the list` : "Not in this list: show the list"),
    beside && step(beside.after, "Next", "j"));
}

function views(run, { row, tries, seats, kept, talks }, query, view) {
  const link = (name, label) => h("a", { href: toOne(run, row.index, query, name), "aria-current": (view ?? "") === (name ?? "") ? "page" : null }, label);
  return h("nav", { class: "views", "aria-label": "Views of this rollout" },
    link(null, "Conversation"),
    tries > 1 && link("group", `Group of ${tries}`),
    (seats > 1 || row.actor !== "policy") && link("episode", `Episode, ${amount(seats, "seat")}`),
    kept && row.turns > 0 && h("a", { href: toRun(run.name, "tokens", { id: row.index, ...(query.stream ? { stream: query.stream } : {}) }) }, "Tokens"),
    h("a", { href: toRun(run.name, "tickets", { ticket: row.ticket }) }, `Ticket ${whole(row.ticket)}`),
    h("span", { class: "grow" }),
    !view && isRendered(talks.shown.flatMap(({ messages }) => messages)) && otherText(run, row, query, view));
}

function details(run, data, query) {
  const { row, metrics, verdicts, error, parent, tries } = data;
  const outcome = [
    ["Expected answer", data.target], ["Reward", number(data.reward)], ["Mean of its group", tries > 1 ? `${number(data.mean_reward)}, ${amount(tries, "rollout")}` : ""],
    ["Advantage", number(row.advantage), "mean over the tokens that train"], ["State", stateMeaning(row.state) || row.state],
    ["Finish", FINISH[row.finish] ?? row.finish],
  ];
  const rest = data.seconds - data.turn_seconds;
  const sum = (spans) => `${seconds(spans.reduce((all, [, took]) => all + took, 0))} in ${amount(spans.length, "call")}`;
  const waited = Object.entries(data.lanes).filter(([lane]) => lane !== "engine").map(([lane, spans]) => [laneName(lane), sum(spans), LANES[lane]?.[1]]);
  const took = [
    ["Episode", data.seconds ? seconds(data.seconds) : "", "from its start until its reward was known"],
    ["Sampling", data.turn_seconds ? `${seconds(data.turn_seconds)} in ${amount(row.turns, "turn")}` : "", "the calls of the engine, queueing included"],
    ["Environment", data.turn_seconds && rest > 0 ? seconds(rest) : "", "the rest: tools, scoring, judges, waiting"],
    ...waited,
  ];
  const known = [
    ["Environment", row.env], ["Actor", row.actor], ["Kind of episode", row.kind], ["Started by", parent],
    ["Purpose", row.domain], ["Step", whole(row.step)], ["Version", versionWords(row), "of the policy that sampled it"], ["Tokens", `${whole(row.tokens)} sampled, ${whole(row.prompt)} in the first prompt`],
    ["Turns", whole(row.turns)], ["Row of the data", whole(row.row)], ["Try", whole(row.member)], ["Time", row.time ? moment(row.time) : ""],
  ];
  const found = measured(metrics);
  return [
    error !== null && h("div", { class: "notice bad" }, h("h2", {}, "Error"), h("pre", {}, error)),
    facts("Outcome", outcome),
    verdicts.length ? h("section", { "aria-label": "Parts of the reward" }, h("h2", {}, "Parts of the reward"), verdicts.map(verdict),
      verdicts.some(({ judge }) => judge === "task") ? h("p", { class: "soft" }, `${verdicts.map(product).join(" + ")} = ${number(data.reward)}`) : null) : null,
    facts(verdicts.length ? "Metrics" : "Why this reward", found, "mono"),
    facts("Durations", took, null, lanes(data)),
    facts("Details", known),
    h("p", {}, h("a", { href: toList(run, { ...query, ticket: row.ticket, env: row.env }) }, "All rollouts of this ticket")),
  ];
}

/** What there is of these facts, under a heading. */
function facts(title, pairs, style = null, more = null) {
  const there = pairs.filter(([, value]) => value !== "" && value !== undefined);
  return there.length ? h("section", { "aria-label": title }, h("h2", {}, title), h("dl", { class: "facts" }, there.map(([name, value, about]) =>
    h("div", {}, h("dt", { class: style, title: about ?? null }, name), h("dd", {}, value)))), more) : null;
}

/** What an episode waits for: the name of its lane, and what that is. */
const LANES = {
  engine: ["Engine", "calls of the engine, from the first step on"],
  queue: ["Queue", "calls that waited in the engine for their first step"],
  tools: ["Tools", "from a reply with calls to the results that were sent with the next one"],
  sandbox: ["Sandbox", "programs of the policy with their tests, in processes of their own"],
  grader: ["Grader", "answers checked in processes of their own"],
  judge: ["Judge", "questions to a model that grades"],
  "user code": ["User code", "functions of the run file's modules: tools, moves, rewards"],
};

function laneName(lane) {
  return LANES[lane]?.[0] ?? lane;
}

/** A lane for the engine and for each thing that the episode waited for, along the episode. */
function lanes({ seconds: whole, lanes: all }) {
  const known = Object.entries(all);
  if (!whole || (known.length === 1 && known[0][1].length < 2) || !known.length) return null;
  const share = (value) => `${(100 * Math.min(1, Math.max(0, value / whole))).toFixed(2)}%`;
  return h("div", { class: "turn-times" }, known.map(([lane, spans]) => [
    h("p", { class: "soft" }, laneName(lane)),
    h("ol", { class: "turn-lane", "aria-label": `${laneName(lane)} along the episode`, vars: { "--lane": `var(--series-${lane === "engine" ? 3 : 5})` } }, spans.map(([started, took], at) => {
      const words = `${lane === "engine" ? "turn" : lane} ${at + 1}: from ${seconds(started)}, ${seconds(took)} long`;
      return h("li", { title: words, vars: { "--from": share(started), "--for": share(took) } }, h("span", { class: "unseen" }, words));
    }))]));
}

function product({ weight, score }) {
  return `${number(weight)} × ${number(score)}`;
}

/** A part of the reward: the environment's own, or a judge's grade with its reasons. */
function verdict({ judge, score, weight, value, text, model, seconds: took, attempts, cached }) {
  const how = [`graded ${number(value)}`, model, cached ? "remembered" : seconds(took), attempts > 1 ? `${whole(attempts)} answers` : ""];
  return h("details", { class: "verdict" },
    h("summary", {}, h("span", { class: "mono" }, judge), ` ${product({ weight, score })}`),
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
