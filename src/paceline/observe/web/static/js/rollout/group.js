// The tries of one ticket side by side: equal ones on one card, and where each leaves the most frequent reply.
import { ask } from "../api.js";
import { h } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { cards } from "../rows.js";
import { stateMark, stateWords, toOne, versionWords } from "./words.js";
import { foldedText } from "./talk.js";

const TAIL = 200; // characters of what is the same that are shown before the first difference

export async function content(run, row, query) {
  const { begin, tries, replies, total } = await ask("rollouts/group", { run: run.name, id: row.index });
  const apart = new Set(tries.map(({ row: one }) => one.member)).size === tries.length;
  tries.forEach((one, at) => (one.name = `Try ${apart ? one.row.member : at}`)); // seats of one episode share its number
  const known = new Map(tries.map((one) => [one.row.index, one]));
  return h("div", { class: "stack" },
    total > tries.length ? h("p", { class: "notice warn" }, `${whole(total)} tries; ${tries.length} are shown.`) : null,
    table(run, row, tries, query),
    begin.length ? h("details", { class: "section" }, h("summary", {}, "Shared prompt", h("span", { class: "faint" }, amount(begin.length, "message"))),
      begin.map(({ role, text }) => h("div", { class: "message other" }, h("header", {}, h("b", {}, role)), foldedText(text)))) : null,
    h("section", { class: "section", "aria-label": "Replies" },
      h("h2", {}, "Replies", h("span", { class: "faint" }, replies.length > 1 ? "marked: from the first difference on; faint: as in the first card" : "all the same")),
      h("div", { class: "columns", tabindex: 0, role: "region", "aria-label": "Replies side by side" }, replies.map((one) => card(run, row, one, known, query)))));
}

function table(run, row, tries, query) {
  const names = [...new Set(tries.flatMap(({ metrics }) => Object.keys(metrics)))].slice(0, 6);
  const heads = ["Try", "Reward", "Advantage", "Tokens", "Turns", "Version", ...names, "State"];
  return h("div", { class: "scroll" }, cards(h("table", { class: "list tries" },
    h("caption", { class: "unseen" }, "Tries of this ticket"),
    h("thead", {}, h("tr", {}, heads.map((name, at) => h("th", { scope: "col", class: at && at < heads.length - 1 ? "right" : null }, name)))),
    h("tbody", {}, tries.map(({ row: one, metrics, name: called }) => h("tr", { class: one.index === row.index ? "ticked" : null },
      h("th", { scope: "row" }, h("a", { href: toOne(run, one.index, query) }, called)),
      h("td", { class: "right" }, number(one.reward)), h("td", { class: "right" }, number(one.advantage)),
      h("td", { class: "right" }, whole(one.tokens)), h("td", { class: "right" }, whole(one.turns)), h("td", { class: "right" }, versionWords(one)),
      names.map((name) => h("td", { class: "right" }, typeof metrics[name] === "number" ? number(metrics[name]) : "–")),
      h("td", {}, stateMark(one.state))))))));
}

/** One reply, and all tries that gave it. */
function card(run, row, { rows, pieces, reference, error }, known, query) {
  const mine = rows.map((index) => known.get(index));
  const many = mine.length > 1;
  const here = rows.includes(row.index);
  const states = [...new Set(mine.map(({ row: one }) => one.state))].filter((state) => !["trained", "evaluated", "matched"].includes(state));
  const links = mine.map(({ row: one, name }) => h("a", { href: toOne(run, one.index, query), "aria-current": one.index === row.index ? "true" : null }, name));
  return h("article", { class: here ? "try here" : "try", "aria-label": many ? `${mine.length} identical tries` : mine[0].name },
    h("header", {}, many ? h("span", {}, `${mine.length} identical tries`) : links,
      h("b", {}, [...new Set(mine.map(({ row: one }) => number(one.reward)))].join(", ")),
      h("span", { class: "faint" }, [reference && many ? "most frequent" : "", here ? (many ? "with this rollout" : "this rollout") : ""].filter(Boolean).join(", "))),
    many && h("p", { class: "row" }, links),
    states.map((state) => h("p", { class: "faint" }, stateWords(state))),
    error && h("pre", { class: "error" }, error),
    pieces.map((piece) => h("div", { class: "piece" }, pieces.length > 1 && h("div", { class: "faint" }, piece.role), pieceText(piece, reference))),
    !pieces.length && h("p", { class: "faint" }, "no messages recorded"));
}

function pieceText({ same, rest, left_out: left }, reference) {
  if (reference) return same ? foldedText(same) : h("div", { class: "faint" }, "empty");
  return h("div", { class: "words" }, same && sharedText(same), rest && h("mark", { class: "parts" }, rest),
    !same && !rest && h("span", { class: "faint" }, "empty"), left ? h("span", { class: "faint" }, ` … ${whole(left)} more characters`) : null);
}

/** What the reference has too: of much of it the end, just before the first difference. */
function sharedText(text) {
  if (text.length <= 2 * TAIL) return h("span", { class: "same" }, text);
  const place = h("span", { class: "same" }, `…${text.slice(-TAIL)}`);
  const more = h("button", { type: "button", class: "quiet", on: { click: () => { place.textContent = text; more.remove(); } } },
    `${whole(text.length - TAIL)} characters as in the first card`);
  return [more, place];
}
