// The tries of one ticket side by side, and where each parts from the first.
import { ask } from "../api.js";
import { h } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { stateMark, stateWords, toOne, versionWords } from "./words.js";
import { foldedText } from "./talk.js";

const TAIL = 200; // characters of what is the same that are shown before a parting

export async function content(run, row, query) {
  const { begin, tries, total } = await ask("rollouts/group", { run: run.name, id: row.index });
  const apart = new Set(tries.map(({ row: one }) => one.member)).size === tries.length;
  tries.forEach((one, at) => (one.name = `Try ${apart ? one.row.member : at}`)); // seats of one episode share its number
  return h("div", { class: "stack" },
    total > tries.length ? h("p", { class: "notice warn" }, `${whole(total)} tries; the first ${tries.length} are shown.`) : null,
    table(run, row, tries, query),
    begin.length ? h("details", { class: "section" }, h("summary", {}, "What all of them begin with", h("span", { class: "faint" }, amount(begin.length, "message"))),
      begin.map(({ role, text }) => h("div", { class: "message other" }, h("header", {}, h("b", {}, role)), foldedText(text)))) : null,
    h("section", { class: "section", "aria-label": "What each said" },
      h("h2", {}, "What each said", h("span", { class: "faint" }, "faint: as the first try said it; marked: from where they part on")),
      h("div", { class: "columns", tabindex: 0, role: "region", "aria-label": "Tries side by side" }, tries.map((one) => column(run, row, one, query)))));
}

function table(run, row, tries, query) {
  const names = [...new Set(tries.flatMap(({ metrics }) => Object.keys(metrics)))].slice(0, 6);
  const heads = ["Try", "Reward", "Advantage", "Tokens", "Turns", "Version", ...names, "Became"];
  return h("div", { class: "scroll" }, h("table", { class: "list tries" },
    h("caption", { class: "unseen" }, "Tries of this ticket"),
    h("thead", {}, h("tr", {}, heads.map((name, at) => h("th", { scope: "col", class: at && at < heads.length - 1 ? "right" : null }, name)))),
    h("tbody", {}, tries.map(({ row: one, metrics, name: called }) => h("tr", { class: one.index === row.index ? "ticked" : null },
      h("th", { scope: "row" }, h("a", { href: toOne(run, one.index, query) }, called)),
      h("td", { class: "right" }, number(one.reward)), h("td", { class: "right" }, number(one.advantage)),
      h("td", { class: "right" }, whole(one.tokens)), h("td", { class: "right" }, whole(one.turns)), h("td", { class: "right" }, versionWords(one)),
      names.map((name) => h("td", { class: "right" }, typeof metrics[name] === "number" ? number(metrics[name]) : "–")),
      h("td", {}, stateMark(one.state)))))));
}

function column(run, row, { row: one, pieces, first, error, name }, query) {
  const same = !first && pieces.length && pieces.every(({ rest }) => !rest);
  return h("article", { class: one.index === row.index ? "try here" : "try", "aria-label": name },
    h("header", {}, h("a", { href: toOne(run, one.index, query) }, name), h("b", {}, number(one.reward)),
      h("span", { class: "faint" }, first ? "the first" : same ? "says the same" : "")),
    !["trained", "evaluated", "matched"].includes(one.state) && h("p", { class: "faint" }, stateWords(one.state)),
    error && h("pre", { class: "error" }, error),
    pieces.map((piece) => h("div", { class: "piece" }, pieces.length > 1 && h("div", { class: "faint" }, piece.role), pieceText(piece, first))),
    !pieces.length && h("p", { class: "faint" }, "nothing was kept"));
}

function pieceText({ same, rest, left_out: left }, first) {
  if (first) return same ? foldedText(same) : h("div", { class: "faint" }, "nothing");
  return h("div", { class: "words" }, same && sharedText(same), rest && h("mark", { class: "parts" }, rest),
    !same && !rest && h("span", { class: "faint" }, "nothing"), left ? h("span", { class: "faint" }, ` … ${whole(left)} more characters`) : null);
}

/** What the first try said too: of much of it the end, just before they part. */
function sharedText(text) {
  if (text.length <= 2 * TAIL) return h("span", { class: "same" }, text);
  const place = h("span", { class: "same" }, `…${text.slice(-TAIL)}`);
  const more = h("button", { type: "button", class: "quiet", on: { click: () => { place.textContent = text; more.remove(); } } },
    `${whole(text.length - TAIL)} characters as in the first`);
  return [more, place];
}
