// What differs between two runs: their settings and curves, or bit for bit the first thing that happened otherwise.
import { ask } from "../api.js";
import { announce, fill, h, prose, say, scrollable } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { figure, visible } from "../replay/words.js";
import { toPage, toRun } from "../router.js";
import { cards } from "../rows.js";

export const title = "Differences";

const STATES = { same: "the same", differs: "differs", later: "not compared: may be a consequence", unknown: "not recorded" };

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
  const exact = h("input", { type: "checkbox", on: { change: () => compare() } });
  exact.checked = Boolean(params.get("exact"));
  const tolerance = h("input", { type: "text", inputmode: "decimal", size: 8, value: params.get("tolerance") ?? "0", autocomplete: "off" });
  const tolerated = h("label", { title: "Numbers this far apart, of 1 or of their own size, count as the same" }, "Tolerance", tolerance);
  const explained = h("p", { class: "soft" });
  const place = h("div", { class: "stack" });
  const missing = ["a", "b"].map((side) => params.get(side)).filter((name) => name && !names.includes(name));
  fill(root, h("div", { class: "stack" },
    h("div", { class: "head" }, h("h1", {}, "Differences of two runs")),
    explained,
    missing.length ? h("div", { class: "notice warn" }, `Not in this folder any more: ${missing.join(", ")}`) : null,
    names.length < 2 ? h("div", { class: "empty" }, h("h2", {}, "There are no two runs here")) : h("form", { class: "controls", on: { submit: (event) => { event.preventDefault(); compare(); } } },
      h("label", {}, "Run", chosen[0]), h("label", {}, "and", chosen[1]),
      h("label", { title: "Find the first difference in the records, to the last bit" }, exact, "Bit for bit"), tolerated,
      h("button", { type: "submit", class: "strong" }, "Compare")),
    place));

  function explain() {
    tolerated.hidden = !exact.checked;
    say(explained, exact.checked
      ? "Both are walked through in the order in which one thing leads to the next. The first thing that is not the same is named; what comes after it may be its consequence."
      : "A metric differs where the two curves are further apart than chance explains, by their scatter from step to step.");
  }

  async function compare() {
    const mine = (turn += 1);
    explain();
    const [a, b] = chosen.map((select) => select.value);
    const query = exact.checked ? { a, b, exact: 1, tolerance: tolerance.value.trim() || "0" } : { a, b };
    history.replaceState(null, "", toPage("diff", query));
    const said = h("span", {});
    const bar = h("progress", { max: 1, "aria-label": "Comparing" });
    fill(place, h("div", { class: "replay-job", role: "status" }, h("b", {}, "Comparing"), bar, said));
    try {
      let data = await ask("diff", query);
      while (data.state === "working") {
        bar.value = data.total_steps ? data.steps / data.total_steps : 0;
        say(said, `${amount(data.steps, "step")} of ${whole(data.total_steps)} and ${amount(data.rollouts, "rollout")} are the same so far`);
        data = await ask("diff", { job: data.job });
        if (gone || mine !== turn) return;
      }
      if (gone || mine !== turn) return;
      if (data.state === "failed") throw new Error(data.failure);
      fill(place, answer(data, [a, b], (wide) => { tolerance.value = wide; compare(); }));
      announce(data.curves ? verdict(data.curves) : data.first ? `First difference: ${data.first.what}` : "No difference", true);
    } catch (error) {
      if (!gone && mine === turn) fill(place, h("div", { class: "notice bad", role: "alert" }, h("h2", {}, "They cannot be compared"), h("p", {}, error.message)));
    }
  }

  explain();
  if (params.get("a") && params.get("b") && !missing.length) compare(); // not awaited: the form can be used meanwhile
  return () => (gone = true);
}

/** `again` compares bits with another tolerance. */
function answer(data, names, again) {
  return [
    data.settings.length ? h("section", { class: "section", "aria-label": "Settings that differ" },
      h("h2", {}, "Settings that differ", h("span", { class: "faint" }, amount(data.settings.length, "key"))), settings(data.settings, names))
      : h("p", {}, "Their settings are the same, but for the name."),
    data.expected.length ? h("div", { class: "notice warn" }, h("b", {}, "Not deterministic, so bit differences are expected: "), prose(data.expected.join("; ")), ".")
      : h("p", { class: "soft" }, "Both are deterministic: they can be equal bit for bit."),
    data.curves ? curves(data.curves, names) : data.first ? difference(data, names, again) : h("div", { class: "notice" }, h("h2", {}, "No difference"),
      h("p", {}, `The same in all that was recorded: ${amount(data.steps, "step")} and ${amount(data.rollouts, "rollout")}.`)),
    data.remarks.length ? h("div", { class: "notice warn" }, h("h2", {}, "The comparison is not complete"), h("ul", {}, data.remarks.map((remark) => h("li", {}, remark)))) : null];
}

function verdict(all) {
  const real = all.filter((one) => one.is_real);
  if (all.every(({ noise }) => noise === null)) return "No metric has enough common steps to be compared";
  return real.length ? `${amount(real.length, "metric")} further apart than chance explains` : "No metric is further apart than chance explains";
}

function curves(all, names) {
  const [real, rest] = [all.filter((one) => one.is_real), all.filter((one) => !one.is_real)];
  return h("section", { class: "section", "aria-label": "Curves" },
    h("h2", {}, verdict(all)),
    real.length ? curveTable(real, names) : null,
    rest.length ? h("details", { class: "section", open: !real.length }, h("summary", {}, real.length ? "No further apart than chance explains" : "Compared metrics", h("span", { class: "faint" }, amount(rest.length, "metric"))), curveTable(rest, names)) : null,
    h("p", { class: "row" }, h("a", { href: toPage("compare", new URLSearchParams(names.map((name) => ["run", name]))) }, "All curves"),
      h("a", { href: toPage("ab", { a: names[0], b: names[1] }) }, "Which is better?")));
}

const signed = (value) => (value > 0 ? "+" : "") + number(value);

/** Each metric over the steps in which it differs most. */
function curveTable(all, names) {
  return scrollable("Metrics of both runs", cards(h("table", { class: "list differs" },
    h("caption", { class: "unseen" }, "Means of both runs over the steps in which they differ most, and the difference that chance explains"),
    h("thead", {}, h("tr", {}, ["Metric", ...names, "Difference", "Chance, 95%", "Steps"].map((name, at) => h("th", { scope: "col", class: at ? "right" : null }, name)))),
    h("tbody", {}, all.map((one) => h("tr", {}, h("th", { scope: "row", class: "mono" }, one.name),
      [number(one.one), number(one.other), signed(one.other - one.one), one.noise === null ? "too few pairs" : `±${number(one.noise)}`, [...new Set(one.steps)].map(whole).join(" to ")].map((text) => h("td", { class: "right" }, text))))))));
}

function settings(rows, names) {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return scrollable("Settings of both runs", cards(h("table", { class: "list differs" },
    h("caption", { class: "unseen" }, "Settings that differ"),
    h("thead", {}, h("tr", {}, ["Key", ...names].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map(({ key, one, other }) => h("tr", {}, h("th", { scope: "row", class: "mono" }, key), h("td", { class: "mono" }, text(one)), h("td", { class: "mono" }, text(other))))))));
}

function difference(data, names, again) {
  const { first, same } = data;
  return h("section", { class: "section", "aria-label": "First difference" },
    h("h2", {}, "First difference: ", prose(first.what)),
    h("p", {}, h("b", {}, first.where), `, after ${amount(same.steps, "whole step")} and ${amount(same.rollouts, "rollout")} ${same.said ? "in which all that was said is the same" : "that are the same"}.`),
    h("p", { class: "meaning" }, prose(data.meaning), data.evaluation ? ` ${first.step ? "It was played to evaluate: the step's training and its loss were compared before it, and are the same." : "It was played to evaluate the model before any training."}` : null),
    distance(first, again),
    h("div", { class: "difference-sides" }, data.sides.map((side, at) => oneSide(side, names[at], first))),
    data.chain.length ? [h("h3", {}, "What was compared, in this order"), h("ol", { class: "difference-chain" }, data.chain.map(({ what, state }) =>
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
  return h("article", { class: "difference-side", "aria-label": name },
    h("h3", {}, h("a", { href: toRun(name) }, name)),
    h("p", { class: "value mono" }, value(side, first)),
    side.tokens ? h("p", { class: "bits", "aria-label": "Tokens around it" }, side.tokens.map(({ id, text }, at) =>
      h(at === side.marked ? "mark" : "span", { class: "bit", title: `id ${id}` }, visible(text, id)))) : null,
    side.said && first.kind !== "prompt" ? h("details", {}, h("summary", {}, "conversation"), h("pre", { class: "said" }, side.said)) : null,
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
