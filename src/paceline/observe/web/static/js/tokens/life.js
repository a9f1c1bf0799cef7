// The life of one ticket: what happened to it, in the order from the draw to the gradient, and the rollouts of its group.
import { h, prose } from "../dom.js";
import { clock, moment, number, seconds, whole } from "../format.js";
import { toRun } from "../router.js";

export function life(run, told) {
  return [
    h("ol", { class: "ticket-life", "aria-label": `The life of ticket ${told.number}` }, told.stages.map((stage) => stageOf(run, stage))),
    told.rollouts.length ? group(run, told) : null,
    told.kept ? null : h("p", { class: "faint" }, "This run keeps a few readable rollouts alone (record.all = false)."),
    journal(told.journal),
  ];
}

function stageOf(run, stage) {
  const link = (page, params, words) => h("a", { href: toRun(run.name, page, params) }, words);
  const time = stage.time ? moment(stage.time) : stage.after ? `after ${moment(stage.after)}` : stage.by ? `before ${moment(stage.by)}` : "";
  return h("li", { class: `stage ${stage.name}` },
    h("div", { class: "what" }, h("b", {}, stage.name), time ? h("span", { class: "faint" }, time) : null),
    h("p", {}, prose(stage.text)),
    stage.phases?.length ? h("p", { class: "soft" }, stage.phases.map(({ name, start, end }, place) =>
      `${place ? ", " : ""}${name} ${clock(start)} for ${seconds(end - start)}`)) : null,
    h("p", { class: "row" },
      stage.ticket !== undefined ? link("tickets", { ticket: stage.ticket }, `Ticket ${stage.ticket}`) : null,
      stage.name === "trained" ? [link("replay", { step: stage.step }, `Replay step ${stage.step}`),
        link("rollouts", { step_from: stage.step, step_to: stage.step }, `All rollouts of step ${stage.step}`)] : null));
}

function group(run, told) {
  const rows = told.rollouts.map((row) => h("tr", {},
    h("th", { scope: "row" }, row.member),
    h("td", {}, row.actor),
    h("td", { class: "right" }, number(row.reward)),
    h("td", { class: "right" }, number(row.advantage)),
    h("td", { class: "right" }, whole(row.tokens)),
    h("td", {}, row.version_max < 0 ? "–" : row.version_min === row.version_max ? row.version_min : `${row.version_min} to ${row.version_max}`),
    h("td", {}, row.finish || "–"),
    h("td", { class: row.error ? "bad" : null }, row.error ? `failed: ${row.error}` : row.state),
    h("td", {}, h("a", { href: toRun(run.name, "rollouts", { id: row.index }), "aria-label": `Conversation of member ${row.member}` }, "conversation"), " · ",
      h("a", { href: toRun(run.name, "tokens", { id: row.index }), "aria-label": `Tokens of member ${row.member}` }, "tokens"))));
  const left = told.rollouts_total - told.rollouts.length;
  return h("section", { class: "section" }, h("h2", {}, "Its group", left ? h("span", { class: "faint" }, `${left} more are not listed`) : null),
    h("div", { class: "scroll" }, h("table", { class: "list" },
      h("caption", { class: "unseen" }, "Rollouts of this ticket"),
      h("thead", {}, h("tr", {}, ["Member", "Actor", "Reward", "Advantage", "Tokens", "Version", "Finish", "State", "Look"].map((name, place) =>
        h("th", { scope: "col", class: place > 1 && place < 5 ? "right" : null }, name)))),
      h("tbody", {}, rows))));
}

/** The lines as they stand in the file. */
function journal(entries) {
  return h("details", { class: "section" }, h("summary", {}, "Journal", h("span", { class: "faint" }, `${entries.length} lines of tickets.jsonl`)),
    h("pre", { class: "raw", tabindex: 0 }, entries.map((entry) => JSON.stringify(entry)).join("\n")));
}
