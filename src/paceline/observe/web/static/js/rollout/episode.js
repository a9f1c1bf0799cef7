// A self-play episode: every seat in its colour, and all turns in order.
import { ask } from "../api.js";
import { h } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { otherText, stateMark, toOne, versionWords } from "./words.js";
import { isRendered, message } from "./talk.js";

const COLOURS = 8;

export async function content(run, row, query) {
  const { seats, line, total, absent } = await ask("rollouts/episode", { run: run.name, id: row.index });
  const names = seatNames(seats);
  const colour = (seat) => (seat % COLOURS) + 1;
  const raw = query.shown === "raw";
  const isDrawn = isRendered(line.flatMap(({ heard, said }) => [...heard, said]));
  return h("div", { class: "stack" },
    total > seats.length ? h("p", { class: "notice warn" }, `${whole(total)} seats; the first ${seats.length} are shown.`) : null,
    h("div", { class: "seats" }, seats.map((seat, at) => card(run, seat, names[at], colour(at), seat.row.index === row.index, query))),
    missing(absent, seats),
    isDrawn && h("p", {}, otherText(run, row, query, "episode")),
    line.length ? h("section", { class: "section", "aria-label": "Turns in order" },
      h("h2", {}, "Turns in order", h("span", { class: "faint" }, seats.length > 1
        ? "each seat's turns are as recorded; the order between seats follows from what they quote of one another" : null)),
      h("ol", { class: "line" }, line.map((turn) => h("li", { vars: { "--who": `var(--series-${colour(turn.seat)})` } },
        turn.heard.length ? h("details", { open: textLength(turn.heard) < 300 }, h("summary", {}, `New to ${names[turn.seat]}: ${amount(textLength(turn.heard), "character")}`),
          turn.heard.map((one) => message(one, { raw }))) : null,
        message(turn.said, { who: names[turn.seat], colour: colour(turn.seat), raw }))))) : h("div", { class: "empty" }, h("h2", {}, "No messages were kept")));
}

/** Actors by their names, and by a number where one sits in several seats. */
function seatNames(seats) {
  const all = seats.map(({ row }) => row.actor || "seat");
  return all.map((name, at) => (all.indexOf(name) === all.lastIndexOf(name) ? name : `${name} ${all.slice(0, at).filter((other) => other === name).length + 1}`));
}

function card(run, { row, parent, error }, name, colour, here, query) {
  return h("article", { class: here ? "seat here" : "seat", vars: { "--who": `var(--series-${colour})` }, "aria-label": `Seat ${name}` },
    h("header", {}, h("a", { href: toOne(run, row.index, query) }, name), row.kind && h("span", { class: "faint" }, row.kind), stateMark(row.state)),
    h("dl", {}, [["Reward", number(row.reward)], ["Advantage", number(row.advantage)], ["Turns", whole(row.turns)], ["Tokens", whole(row.tokens)], ["Version", versionWords(row)],
      ...(parent ? [["Started by", parent]] : [])].map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    error && h("p", { class: "error" }, error));
}

function missing(absent, seats) {
  const note = "The record keeps seats that the policy trains in: a past version, a judge or a fixed opponent has no conversation of its own.";
  if (absent.length) return h("p", { class: "notice" }, `${absent.join(", ")} played here too, but not as the policy. ${note}`);
  return seats.length === 1 ? h("p", { class: "notice" }, note) : null;
}

function textLength(messages) {
  return messages.reduce((sum, { parts }) => sum + parts.reduce((more, { text }) => more + text.length, 0), 0);
}
