// The tokens of one sample, each coloured by what it adds to the loss or takes from it. Arrow keys walk from token to token.
import { fill, h } from "../dom.js";
import { figure, share, visible } from "./words.js";

const KEPT = 40;
const CHUNK = 2000;

/** `largest` is the share that has the full colour. `at` is the trained token to begin with. */
export function strip(data, component, largest, at = null) {
  const trained = data.trained;
  const card = h("div", { class: "bit-card", "aria-live": "polite" });
  if (!trained) return h("p", { class: "soft" }, "No token of this sample trains.");
  const line = h("div", { class: "bits", role: "group", "aria-label": "Tokens of the sample; arrow keys walk through those that train" });
  const numbers = new Map(trained.places.map((place, token) => [place, token]));
  const rules = rulesByToken(trained);
  const others = data.other ? rulesByToken(data.other) : new Map();
  const mine = sumShares(trained, component);
  const theirs = data.other ? sumShares(data.other, component) : null;
  const chips = [];
  let rest = pieces(data, numbers);

  function chip(place) {
    const token = numbers.get(place);
    const text = visible(data.text?.[place], data.ids[place]);
    if (token === undefined) return h("span", { class: "bit bit-dim" }, text);
    const value = theirs ? theirs[token] - mine[token] : mine[token];
    const held = rules.has(token) || others.has(token) || trained.skipped;
    const amount = largest ? Math.min(1, Math.abs(value) / largest) : 0;
    const made = h("button", {
      type: "button", tabindex: -1, class: `bit ${value > 0 ? "pull-up" : value < 0 ? "pull-down" : ""} ${held ? "pull-held" : ""}`,
      vars: { "--amount": `${Math.round(100 * Math.sqrt(amount))}%` }, data: { token },
      "aria-label": `${data.text?.[place] ?? data.ids[place]}, ${theirs ? "difference" : "share"} ${share(value)}${held ? ", held back" : ""}`,
      on: { focus: () => select(token), click: () => made.focus() },
    }, text);
    chips[token] = made;
    return made;
  }

  function more() {
    const now = rest.slice(0, CHUNK);
    rest = rest.slice(CHUNK);
    line.append(...now.map((one) => (typeof one === "number" ? chip(one) : h("span", { class: "bit-gap" }, one.gap))));
    if (rest.length) {
      const button = h("button", { type: "button", class: "quiet", on: { click: () => { button.remove(); more(); } } }, `${rest.length} more tokens`);
      line.append(button);
    }
  }

  function select(token) {
    for (const one of line.querySelectorAll("button.bit[tabindex='0']")) one.tabIndex = -1;
    chips[token].tabIndex = 0;
    fill(card, tokenCard(data, token, rules, others));
  }

  line.addEventListener("keydown", (event) => {
    const token = Number(event.target.dataset?.token);
    const to = { ArrowRight: token + 1, ArrowLeft: token - 1, Home: 0, End: chips.length - 1 }[event.key];
    if (Number.isNaN(token) || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    chips[Math.max(0, Math.min(chips.length - 1, to))]?.focus();
  });
  more();
  while (at !== null && !chips[at] && rest.length) {
    line.lastElementChild.remove();
    more();
  }
  const first = at ?? mine.reduce((best, value, token) => (Math.abs(value) > Math.abs(mine[best]) ? token : best), 0);
  if (chips[first]) select(first);
  return h("div", { class: "sample-body" }, line, card);
}

/** Places to show; long stretches that do not train are shown as their length. */
function pieces(data, numbers) {
  const out = [];
  let quiet = [];
  const settle = (end) => {
    const cut = quiet.length - 2 * KEPT;
    if (cut > 0) out.push(...(out.length ? quiet.slice(0, KEPT) : []), { gap: `… ${out.length ? cut : cut + KEPT} tokens …` }, ...(end ? [] : quiet.slice(-KEPT)));
    else out.push(...quiet);
    quiet = [];
  };
  data.ids.forEach((_, place) => {
    if (!numbers.has(place)) return quiet.push(place);
    settle(false);
    out.push(place);
  });
  settle(true);
  return out;
}

function sumShares(trained, component) {
  const all = Object.entries(trained.share).filter(([name]) => !component || name === component).map(([, values]) => values);
  return trained.places.map((_, token) => all.reduce((sum, values) => sum + (values[token] ?? 0), 0));
}

function rulesByToken(trained) {
  const rules = new Map();
  for (const { token, component, rule } of trained.held_back) rules.set(token, [...(rules.get(token) ?? []), `${component}: ${rule}`]);
  return rules;
}

function tokenCard(data, token, rules, others) {
  const { trained, other } = data;
  const place = trained.places[token];
  const row = (name, one, two, note = "", write = figure) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, write(one)),
    other ? h("td", {}, write(two)) : null, h("td", { class: "soft" }, note));
  const components = [...new Set([...Object.keys(trained.share), ...Object.keys(other?.share ?? {})])];
  return [
    h("p", {}, "Token ", h("b", { class: "mono" }, visible(data.text?.[place], data.ids[place])), ` (id ${data.ids[place]}), place ${place} of the sample`),
    h("table", { class: "bit-figures" },
      h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col" }, other ? "as it was set" : ""), other ? h("th", { scope: "col" }, "with the change") : null, h("td", {}))),
      h("tbody", {},
        components.map((name) => row(`share of loss/${name}`, trained.share[name]?.[token] ?? 0, other?.share[name]?.[token] ?? 0, "all shares of a component add up to its loss", share)),
        row("advantage", trained.advantage[token], other?.advantage[token], "above 0 the token is made likelier", share),
        row("ratio", trained.ratio[token], other?.ratio[token], "probability now over probability when sampled (or at the batch's start)"),
        row("log probability", trained.logprob[token], other?.logprob[token], "with the weights named above"),
        row("… when sampled", trained.sampler[token], other?.sampler[token]),
        row("entropy", trained.entropy[token], other?.entropy[token]))),
    heldBackRow("Held back", trained, rules.get(token)),
    other ? heldBackRow("With the change", other, others.get(token)) : null];
}

function heldBackRow(title, trained, rules) {
  if (trained.skipped) return h("p", { class: "rule" }, h("b", {}, title), ": the whole sample is left out (clip_skip_threshold)");
  return rules ? rules.map((rule) => h("p", { class: "rule" }, h("b", {}, title), `: ${rule}`)) : null;
}
