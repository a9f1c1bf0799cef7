// The differences between two runs: settings, then the first thing that happened otherwise, with both sides of it.
import { ask } from "../api.js";
import { announce, fill, h, prose, say } from "../dom.js";
import { amount, whole } from "../format.js";
import { figure, visible } from "../replay/words.js";
import { toPage, toRun } from "../router.js";

export const title = "Diff";

const STATES = { same: "the same", differs: "differs", later: "not looked at: may be a consequence", unknown: "not recorded" };

export async function render(root, _, params) {
  const { runs } = await ask("runs");
  const names = runs.map((run) => run.name);
  let gone = false;
  let turn = 0;
  const chosen = ["a", "b"].map((side, at) => {
    const select = h("select", {}, names.map((name) => h("option", { value: name }, name)));
    select.value = names.includes(params.get(side)) ? params.get(side) : names[at] ?? "";
    return select;
  });
  const tolerance = h("input", { type: "text", inputmode: "decimal", size: 8, value: params.get("tolerance") ?? "0", autocomplete: "off" });
  const place = h("div", { class: "stack" });
  const missing = ["a", "b"].map((side) => params.get(side)).filter((name) => name && !names.includes(name));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, "Where two runs part")),
    h("p", { class: "soft" }, "Both are walked through in the order in which one thing leads to the next. The first thing that is not the same is named; what comes after it may be its consequence."),
    missing.length ? h("div", { class: "notice warn" }, `Not in this folder any more: ${missing.join(", ")}`) : null,
    names.length < 2 ? h("div", { class: "empty" }, h("h2", {}, "There are no two runs here")) : h("form", { class: "controls", on: { submit: (event) => { event.preventDefault(); compare(); } } },
      h("label", {}, "Run", chosen[0]), h("label", {}, "and", chosen[1]),
      h("label", { title: "Numbers this far apart, of 1 or of their own size, count as the same" }, "Tolerance", tolerance),
      h("button", { type: "submit", class: "strong" }, "Compare")),
    place));

  async function compare() {
    const mine = (turn += 1);
    const [a, b] = chosen.map((select) => select.value);
    const query = { a, b, tolerance: tolerance.value.trim() || "0" };
    history.replaceState(null, "", toPage("diff", query));
    const said = h("span", {});
    const bar = h("progress", { max: 1, "aria-label": "Comparing" });
    fill(place, h("div", { class: "replay-job", role: "status" }, h("b", {}, "Comparing"), bar, said));
    try {
      let told = await ask("diff", query);
      while (told.state === "working") {
        bar.value = told.total_steps ? told.steps / told.total_steps : 0;
        say(said, `${amount(told.steps, "step")} of ${whole(told.total_steps)} and ${amount(told.rollouts, "rollout")} are the same so far`);
        told = await ask("diff", { job: told.job });
        if (gone || mine !== turn) return;
      }
      if (told.state === "failed") throw new Error(told.failure);
      fill(place, answer(told, [a, b], (wide) => { tolerance.value = wide; compare(); }));
      announce(told.first ? `First difference: ${told.first.what}` : "No difference", true);
    } catch (error) {
      if (!gone && mine === turn) fill(place, h("div", { class: "notice bad", role: "alert" }, h("h2", {}, "They cannot be compared"), h("p", {}, error.message)));
    }
  }

  if (params.get("a") && params.get("b") && !missing.length) await compare();
  return () => (gone = true);
}

/** `again` compares with another tolerance. */
function answer(told, names, again) {
  return [
    told.remarks.length ? h("div", { class: "notice warn" }, h("h2", {}, "The comparison is not complete"), h("ul", {}, told.remarks.map((remark) => h("li", {}, remark)))) : null,
    told.settings.length ? h("details", { class: "section", open: told.settings.length <= 8 },
      h("summary", {}, "Settings that differ", h("span", { class: "faint" }, amount(told.settings.length, "key"))), settings(told.settings, names))
      : h("p", { class: "soft" }, "Their settings are the same, but for the name."),
    told.first ? difference(told, names, again) : h("div", { class: "notice" }, h("h2", {}, "No difference"),
      h("p", {}, `The same in all that was recorded: ${amount(told.steps, "step")} and ${amount(told.rollouts, "rollout")}.`))];
}

function settings(rows, names) {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return h("div", { class: "scroll" }, h("table", { class: "list differs" },
    h("caption", { class: "unseen" }, "Settings that differ"),
    h("thead", {}, h("tr", {}, ["Key", ...names].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map(({ key, one, other }) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key), h("td", { class: "mono" }, text(one)), h("td", { class: "mono" }, text(other)))))));
}

function difference(told, names, again) {
  const { first, same } = told;
  return h("section", { class: "section", "aria-label": "First difference" },
    h("h2", {}, "First difference: ", prose(first.what)),
    h("p", {}, h("b", {}, first.where), `, after ${amount(same.steps, "whole step")} and ${amount(same.rollouts, "rollout")} ${same.said ? "in which all that was said is the same" : "that are the same"}.`),
    h("p", { class: "meaning" }, prose(told.meaning), told.evaluation ? ` ${first.step ? "It was played to evaluate: the step's training and its loss were compared before it, and are the same." : "It was played to evaluate the model before any training."}` : null),
    distance(first, again),
    h("div", { class: "parting-sides" }, told.sides.map((side, at) => oneSide(side, names[at], first))),
    told.chain.length ? [h("h3", {}, "What was compared, in this order"), h("ol", { class: "parting-chain" }, told.chain.map(({ what, state }) =>
      h("li", { class: state }, what, " ", h("span", { class: "state" }, STATES[state]))))] : null);
}

/** Numbers that are all but equal differ by rounding, and something else may come after. */
function distance({ one, other, kind }, again) {
  if (typeof one !== "number" || typeof other !== "number" || ["token", "prompt", "version", "row"].includes(kind)) return null;
  const far = Math.abs(one - other) / Math.max(1, Math.abs(one));
  const wide = far <= 1e-5 ? "1e-5" : "1e-3";
  return h("p", { class: "row" }, `They are ${figure(Math.abs(one - other))} apart.`, far <= 1e-3
    ? h("button", { type: "button", on: { click: () => again(wide) } }, `Look past differences up to ${wide}`) : null);
}

function oneSide(side, name, first) {
  return h("article", { class: "parting-side", "aria-label": name },
    h("h3", {}, h("a", { href: toRun(name) }, name)),
    h("p", { class: "value mono" }, value(side, first)),
    side.tokens ? h("p", { class: "bits", "aria-label": "Tokens around it" }, side.tokens.map(({ id, text }, at) =>
      h(at === side.marked ? "mark" : "span", { class: "bit", title: `id ${id}` }, visible(text, id)))) : null,
    side.said && first.kind !== "prompt" ? h("details", {}, h("summary", {}, "what was said"), h("pre", { class: "said" }, side.said)) : null,
    side.rollout === null ? h("p", { class: "faint" }, first.ticket === null ? "" : "this run has no such rollout") : h("p", { class: "row" },
      h("a", { href: toRun(name, "rollouts", { id: side.rollout }) }, `rollout ${side.rollout}`),
      side.place ? h("a", { href: toRun(name, "tokens", { id: side.rollout, ...side.place }) }, `token ${side.place.at}`) : null));
}

/** A token by its text, everything else as it is. */
function value(side, first) {
  const shown = side.value === null || side.value === undefined ? "–" : typeof side.value === "string" ? side.value : JSON.stringify(side.value);
  const token = ["token", "prompt"].includes(first.kind) ? side.tokens?.[side.marked] : null;
  return token?.text ? `${visible(token.text, token.id)}  (id ${shown})` : shown;
}
