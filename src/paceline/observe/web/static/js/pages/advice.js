// Advisories: what a run's own figures say against it, with the evidence, how sure it is, and which key to turn.
import { ask } from "../api.js";
import { Chart } from "../chart/chart.js";
import { Group } from "../chart/parts.js";
import { arrange, points } from "../curves.js";
import { announce, fill, h, prose, scrollable } from "../dom.js";
import { amount, number, whole } from "../format.js";
import { toRun } from "../router.js";
import { cards } from "../rows.js";

export const title = "Advice";
const PATIENCE = 4000;
const MOST_CURVES = 3;

const asked = new WeakMap();

/** What is said against the run; the tab and the page, which ask at the same time, share one answer. */
function advice(run) {
  if (!asked.has(run)) asked.set(run, ask("advice", { run: run.name }).finally(() => asked.delete(run)));
  return asked.get(run);
}

/** The first cause, in a sentence, for the overview. */
export async function firstCause(run) {
  const [first, ...more] = (await advice(run)).found;
  if (!first) return null;
  const [setting] = first.knobs;
  const fix = first.fix ? prose(first.fix) : setting ? ["set ", h("code", {}, `${setting.key} = ${setting.text}`), `: ${setting.why}.`] : null;
  return h("div", { class: "notice warn first-cause" }, h("h2", {}, prose(first.title)), h("p", {}, prose(first.seen)), fix ? h("p", {}, h("b", {}, "Fix: "), fix) : null,
    h("p", { class: "faint" }, h("a", { href: toRun(run.name, "advice") }, more.length ? `Advice on this and ${amount(more.length, "more thing")}` : "Advice"), ": the evidence", setting ? ", and every setting to try." : "."));
}

/** How many advisories there are, for the tab. */
export async function badge(run) {
  return (await advice(run)).found.length;
}

export async function render(root, run) {
  const place = h("div", { class: "stack advice" });
  let charts = [];
  let before = "";
  const close = () => charts.splice(0).forEach((chart) => chart.close());
  const draw = async () => {
    const data = await advice(run);
    const now = JSON.stringify(data);
    if (now === before || !place.isConnected && before) return;
    if (before) announce(`Advice: ${amount(data.found.length, "finding")}`);
    before = now;
    close();
    const group = new Group();
    fill(place, head(data), data.found.map((one) => card(one, run, group, charts)), pauses(run), ruleList(data));
  };
  fill(root, place);
  await draw();
  let again = 0;
  const later = () => {
    again ||= setTimeout(() => {
      again = 0;
      draw().catch(() => {}); // the next news tries again
    }, PATIENCE);
  };
  const ends = [run.on("metrics", later), run.on("reset", later), run.on("standing", later)];
  return () => {
    ends.forEach((end) => end());
    clearTimeout(again);
    close();
  };
}

function head({ found, steps, trained, silence }) {
  const few = found.length === 1 ? "One thing" : `${found.length} things, the first cause first,`;
  const where = trained ? `in the last ${amount(trained, "step")} (${whole(steps[0])} to ${whole(steps[1])})` : "in what was sampled before the first step";
  return h("div", {},
    h("div", { class: "head" }, h("h1", {}, "Advice"), h("span", { class: "soft" }, found.length ? `${few} ${where}` : "")),
    found.length ? null : h("div", { class: "empty" }, h("h2", {}, "Nothing found"), h("p", {}, `${silence[0].toUpperCase()}${silence.slice(1)}.`)));
}

function card(one, run, group, charts) {
  const id = `advice-${one.rule}-${one.env}`;
  return h("article", { class: `notice ${one.follows ? "" : "warn"} advisory`, "aria-labelledby": id },
    h("h2", { id }, prose(one.title)),
    h("div", { class: "row" }, h("span", { class: "tag" }, one.rule), h("span", { class: "tag" }, one.env || "whole run"),
      h("span", { class: "faint" }, `steps ${whole(one.steps[0])} to ${whole(one.steps[1])}`)),
    one.comparison ? h("p", {}, h("strong", {}, one.comparison)) : null,
    one.follows ? h("p", { class: "soft" }, prose(`May follow from \`${one.follows}\`, above: mend that first.`)) : null,
    h("p", {}, prose(one.seen)),
    h("dl", {},
      one.fix ? [h("dt", {}, "Fix"), h("dd", {}, prose(one.fix))] : null,
      one.knobs.length ? [h("dt", {}, "Settings"), h("dd", {}, knobs(one.knobs))] : null,
      h("dt", {}, "How sure"), h("dd", {}, prose(one.basis)),
      one.caution ? [h("dt", {}, "Note"), h("dd", {}, prose(one.caution))] : null,
      one.rollouts.length ? [h("dt", {}, "Look at"), h("dd", { class: "row" }, one.rollouts.map((row) => rollout(row, run)))] : null),
    curves(one, run, group, charts));
}

function knobs(rows) {
  return scrollable("Keys to turn", cards(h("table", { class: "list" },
    h("thead", {}, h("tr", {}, ["Key", "Now", "Try", "Why", "On the command line"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((knob) => h("tr", {},
      h("th", { scope: "row", class: "mono" }, knob.key),
      h("td", { class: "mono" }, knob.now === null ? "not set" : JSON.stringify(knob.now)),
      h("td", { class: "mono suggested" }, knob.text),
      h("td", {}, prose(knob.why)),
      h("td", { class: "mono" }, knob.flag)))))));
}

function rollout({ index, step, reward, tokens }, run) {
  return h("a", { class: "tag", href: toRun(run.name, "rollouts", { id: index }) },
    `rollout ${index}: step ${whole(step)}, reward ${number(reward)}, ${amount(tokens, "token")}`);
}

function curves(one, run, group, charts) {
  const names = one.metrics.filter((name) => run.columns[name]?.some((value) => value !== null)).slice(0, MOST_CURVES);
  const drawn = names.map((name, colour) => {
    const [{ chart: { unit, format } }] = arrange([name]);
    const chart = new Chart(group, { title: name, unit, format, hint: "" });
    chart.update([{ label: name, colour, ...points(run.columns, name, group.axis) }]);
    charts.push(chart);
    return chart.element;
  });
  return drawn.length ? h("div", { class: "charts" }, drawn) : null;
}

/** When environments were paused by an advisory, and when they were drawn from again. */
function pauses(run) {
  const data = run.standing.events.filter(({ event, text }) => event === "note"
    && /since `advice\.pause` names|has rested and is drawn from again/.test(String(text)));
  if (!data.length) return null;
  return h("section", { class: "section", "aria-label": "Pauses" }, h("h2", {}, "Pauses"),
    h("ul", {}, data.slice(-20).reverse().map(({ text }) => h("li", {}, prose(text)))));
}

/** The measured value, also of a rule that says nothing; bold where it is a finding. */
function measured({ env, value, missing }, { found, measured: all, name, below, limit }) {
  const beyond = value !== null && !found.includes(env) && (below ? value < limit : value > limit);
  const text = value === null ? missing : beyond ? `${number(value)}, no finding: what else must hold does not` : number(value);
  const label = all.length > 1 ? h("span", { class: "faint" }, `${env} `) : null;
  return h("div", { class: value === null ? "faint" : null }, label, found.includes(env) && value !== null ? h("strong", { data: { rule: name } }, text) : text);
}

function ruleList({ rules: all }) {
  const rules = [...all].sort((one, other) => other.found.length - one.found.length);
  return h("section", { class: "section", "aria-label": "All that was looked for" }, h("h2", {}, "All that was looked for"),
    scrollable("Rules with their limits", cards(h("table", { class: "list" },
      h("thead", {}, h("tr", {}, ["Question", "Found", "Limit", "Key of the limit", "Pauses (advice.pause)"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rules.map((rule) => h("tr", {},
        h("th", { scope: "row" }, rule.asks, h("span", { class: "faint help" }, prose(rule.help))),
        h("td", {}, rule.measured.map((one) => measured(one, rule))),
        h("td", {}, `${rule.below ? "at least" : "at most"} ${number(rule.limit)}`),
        h("td", { class: "mono" }, `advice.${rule.name}`),
        h("td", {}, rule.pauses.length ? rule.pauses.join(", ") : "none"))))))));
}
