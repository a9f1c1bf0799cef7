// The league: how strong each version is, how sure that is, and the result of each pair.
import { ask } from "../api.js";
import { fill, h, scrollable } from "../dom.js";
import { amount, whole } from "../format.js";
import { toList } from "./words.js";

export async function render(root, run) {
  const place = h("div", { class: "stack" });
  fill(root, h("div", { class: "head" }, h("h1", {}, "League"), h("a", { href: toList(run, { domain: "match" }) }, "Games for the ratings"),
    h("a", { href: toList(run, {}) }, "All rollouts")), place);
  let before = "";
  const draw = async () => {
    const data = await ask("rollouts/league", { run: run.name });
    const now = JSON.stringify(data);
    if (now === before) return;
    before = now;
    fill(place, content(data));
  };
  await draw();
  let again = 0;
  const end = run.on("metrics", () => {
    clearTimeout(again);
    again = setTimeout(() => draw().catch(() => null), 1000);
  });
  return () => {
    end();
    clearTimeout(again);
  };
}

function content({ step, leagues }) {
  if (step === null) return h("div", { class: "empty" }, h("h2", {}, "No checkpoint yet"), h("p", {}, "The games of a league are kept in checkpoints."));
  const rated = leagues.filter(({ ratings }) => ratings.length);
  if (!rated.length) return h("div", { class: "empty" }, h("h2", {}, "No games yet"), h("p", {}, "Versions are rated when a second one has joined the league."));
  return [h("p", { class: "soft" }, `As of the checkpoint at step ${whole(step)}.`), rated.map(league)];
}

function league({ env, ratings, scores, games }) {
  const low = Math.min(...ratings.map((rating) => rating.low));
  const high = Math.max(...ratings.map((rating) => rating.high));
  const at = (points) => `${(100 * (points - low)) / (high - low || 1)}%`;
  const total = games.flat().reduce((sum, many) => sum + many, 0) / 2;
  return h("section", { class: "section league", "aria-label": `League of ${env}` },
    h("h2", {}, env, h("span", { class: "faint" }, `${amount(ratings.length, "player")}, ${amount(total, "game")}`)),
    h("div", { class: "pair" },
      scrollable("Ratings", h("table", { class: "list" },
        h("caption", {}, "Ratings in Elo points around the mean of all, with the range that holds 95%"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Version"), ["Rating", "From", "To", "Games"].map((name) => h("th", { scope: "col", class: "right" }, name)), h("th", { scope: "col" }, "Range"))),
        h("tbody", {}, ratings.map(({ player, points, low: from, high: to, games: many }) => h("tr", {}, h("th", { scope: "row" }, player),
          [withSign(points), withSign(from), withSign(to), whole(many)].map((text) => h("td", { class: "right" }, text)),
          h("td", {}, h("span", { class: "span", "aria-hidden": "true", vars: { "--from": at(from), "--to": at(to), "--at": at(points) } }, h("i"), h("b")))))))),
      scrollable("Points of each pair", h("table", { class: "list payoff" },
        h("caption", {}, "Mean points a game that the row took from the column: a win is 1, a draw half"),
        h("thead", {}, h("tr", {}, h("td"), ratings.map(({ player }) => h("th", { scope: "col" }, player)))),
        h("tbody", {}, ratings.map(({ player }, row) => h("tr", {}, h("th", { scope: "row" }, player), ratings.map((other, column) => cell(scores[row][column], games[row][column])))))))));
}

function cell(score, games) {
  if (score === null) return h("td", { class: "none" }, h("span", { "aria-label": "no games" }, "·"));
  const strength = `${Math.round(Math.abs(score - 0.5) * 110)}%`;
  return h("td", { class: score < 0.5 ? "lost" : "won", vars: { "--strength": strength }, title: amount(games, "game") }, score.toFixed(2));
}

function withSign(points) {
  const text = whole(points);
  return points > 0 && text !== "0" ? `+${text}` : text;
}
