// The messages of a rollout. They are untrusted: every word goes in as text, and images only as drawn pixels.
import { fill, h } from "../dom.js";
import { amount, seconds, whole } from "../format.js";
import { drawn } from "./markup.js";
import { FINISH } from "./words.js";

const LONG = 2400; // characters of a message that are shown at once
const HEAD = 1200;
const ROLES = { system: "System", developer: "Developer", user: "User", assistant: "Policy", tool: "Tool result", function: "Tool result" };

/** All conversations of a rollout. */
export function conversations({ total, shown: talks }, raw) {
  if (!total) return h("div", { class: "empty" }, h("h2", {}, "No messages"), h("p", {}, "No conversation was kept of this rollout."));
  const left = total - talks.length;
  const name = (at) => (total > 1 ? `Conversation ${left + at + 1} of ${total}` : "Conversation");
  return [left ? h("p", { class: "notice" }, `The last ${talks.length} of ${total} conversations.`) : null, talks.map((talk, at) => h("section", { class: "talk", "aria-label": name(at) },
    total > 1 && h("h2", {}, name(at)),
    talk.prompt_tokens !== undefined && h("p", { class: "soft" },
      `Its prompt was given as ${amount(talk.prompt_tokens, "token")}, and no text of it was kept.`),
    talk.tools?.length ? toolList(talk.tools) : null,
    talk.messages.map((one) => message(one, { raw }))))];
}

/** One message; `who` replaces the role's name, `colour` is a series of the theme, and `raw` shows texts as they were written. */
export function message(one, { who = null, colour = null, raw = false } = {}) {
  const role = Object.hasOwn(ROLES, one.role) ? one.role : "other";
  const label = who ?? ROLES[one.role] ?? (one.role || "No role");
  const body = [one.parts.map((each) => part(each, raw)), one.calls.map(call)];
  if (!one.parts.length && !one.calls.length) body.push(h("p", { class: "faint" }, "nothing"));
  const header = h("header", {}, h("b", {}, label), one.name && h("span", { class: "mono" }, one.name),
    one.answers && h("span", { class: "faint mono" }, `to ${one.answers}`), h("span", { class: "grow" }), one.turn && h("span", { class: "faint" }, turnWords(one.turn)));
  const shown = role === "system" || role === "developer" ? h("details", {}, h("summary", {}, `Show ${amount(length(one), "character")}`), body) : body;
  return h("article", { class: `message ${role}`, vars: colour ? { "--who": `var(--series-${colour})` } : {}, "aria-label": label }, header, shown);
}

function turnWords({ number, tokens, finish, versions, temperature, seconds: took }) {
  const by = versions.length > 1 ? `versions ${versions[0]} to ${versions.at(-1)}` : versions.length ? `version ${versions[0]}` : "";
  return [`turn ${number}`, amount(tokens, "token"), took ? seconds(took) : "", by, `temperature ${temperature}`, FINISH[finish] ?? finish].filter(Boolean).join(" · ");
}

function length({ parts }) {
  return parts.reduce((sum, { text }) => sum + text.length, 0);
}

function part({ kind, text, what, source, rendered, left_out: left }, raw) {
  if (kind === "image") return h("figure", {}, h("img", { src: source, alt: text, loading: "lazy", decoding: "async" }), h("figcaption", { class: "faint" }, text));
  if (kind === "unshown") return h("p", { class: "unshown" }, text);
  const shown = [rendered && !raw ? foldedMarkup(rendered, text) : foldedText(text, kind === "other" ? "words mono" : "words"), isBoard(text) ? board(text) : null, left ? h("p", { class: "faint" }, `${whole(left)} more characters are in the record.`) : null];
  if (kind === "thought") return h("details", { class: "thought" }, h("summary", {}, `Thought, ${amount(text.length, "character")}`), shown);
  if (kind === "other") return h("div", {}, h("p", { class: "faint" }, what), shown);
  return shown;
}

const SQUARES = "abcdefghi";

/** Whether a text is a board of tic-tac-toe: nine letters, a free square by its own letter. */
function isBoard(text) {
  return text.length === SQUARES.length && [...text].every((letter, at) => "xo".includes(letter) || letter === SQUARES[at]);
}

/** The same board in rows, below the text that the policy got. */
function board(text) {
  return h("div", { class: "board mono", role: "img", "aria-label": `Board, row by row: ${text.match(/.../g).join(", ")}` },
    [...text].map((letter) => h("span", { class: "xo".includes(letter) ? null : "faint" }, letter)));
}

function call({ name, arguments: given, id }) {
  return h("div", { class: "call" }, h("div", {}, h("b", {}, "Calls "), h("code", {}, name || "something unnamed"), id && h("span", { class: "faint mono" }, ` ${id}`)),
    given && given !== "{}" ? foldedText(given, "words mono") : null);
}

function toolList(tools) {
  return h("details", { class: "offered" }, h("summary", {}, `${amount(tools.length, "tool")} offered: ${tools.map(({ name }) => name).join(", ")}`),
    h("dl", {}, tools.map(({ name, description }) => [h("dt", { class: "mono" }, name), h("dd", {}, description)])));
}

/** Whether any message has something to draw, so that raw and rendered differ. */
export function isRendered(messages) {
  return messages.some(({ parts }) => parts.some(({ rendered }) => rendered));
}

/** What a text draws; of a long one the beginning, and a button for the rest. */
function foldedMarkup(trees, text) {
  const place = h("div", { class: "words markup" }, drawn(trees));
  if (text.length <= LONG) return place;
  place.classList.add("folded");
  const button = h("button", { type: "button", class: "quiet", "aria-expanded": "false" }, `Show all ${whole(text.length)} characters`);
  button.addEventListener("click", () => {
    const folded = place.classList.toggle("folded");
    button.textContent = folded ? `Show all ${whole(text.length)} characters` : "Show less";
    button.setAttribute("aria-expanded", String(!folded));
  });
  return [place, button];
}

/** A text; of a long one the beginning, and a button for the rest. */
export function foldedText(text, style = "words") {
  if (text.length <= LONG) return h("div", { class: style }, text);
  const place = h("div", { class: style });
  const button = h("button", { type: "button", class: "quiet", "aria-expanded": "false" });
  let open = false;
  const draw = () => {
    fill(place, open ? text : `${text.slice(0, HEAD)}…`);
    button.textContent = open ? "Show less" : `Show all ${whole(text.length)} characters`;
    button.setAttribute("aria-expanded", String(open));
  };
  button.addEventListener("click", () => {
    open = !open;
    draw();
  });
  draw();
  return [place, button];
}
