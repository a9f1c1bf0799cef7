// Every token of a sample: coloured by a stream, and explained one by one.
import { ask } from "../api.js";
import { fill, h, memory } from "../dom.js";
import { count, number } from "../format.js";
import { toRun } from "../router.js";
import { Card } from "../tokens/card.js";
import { lines, scale, streams } from "../tokens/streams.js";
import { KEYS, Strip, versionsBefore, walk } from "../tokens/strip.js";

export const title = "Tokens";

export async function render(root, run, params) {
  const asked = Object.fromEntries(["id", "sample", "turn"].map((name) => [name, params.get(name) || null]));
  const data = await ask("tokens", { run: run.name, ...asked });
  if (data.nothing) {
    fill(root, h("div", { class: "stack" }, data.rollout ? head(run, data, params.get("stream")) : h("h1", {}, "Tokens"),
      h("div", { class: "empty" }, h("h2", {}, "No tokens here"), h("p", {}, data.nothing))));
    return undefined;
  }
  const again = await replayed(run, data);
  const all = streams(data, again);
  const usable = all.filter((stream) => stream.values);
  // What was asked for stays asked for on the way to other rollouts, also where this one does not have it.
  let wanted = params.get("stream") ?? memory.get("token stream", usable[0].key);
  let stream = usable[0];
  const card = new Card(run, data, again, usable);
  const strip = new Strip(data, again, (at, really) => (really ? go(at, "") : card.show(at ?? strip.chosen)));
  const legend = h("div", { class: "token-legend" });
  const above = h("div");
  const chooser = h("div");
  const choice = h("select", { "aria-label": "Colour tokens by", on: { change: () => show(choice.value) } },
    all.map(({ key, label, missing }) => h("option", { value: key, disabled: Boolean(missing) }, missing ? `${label} (not recorded)` : label)));

  function show(key) {
    wanted = key;
    stream = usable.find((one) => one.key === key) ?? usable[0];
    choice.value = stream.key;
    if (stream.key === key) memory.set("token stream", key);
    strip.paint(stream);
    fill(legend, scale(stream), h("span", { class: "soft" }, stream.meaning),
      stream.key === key ? null : h("b", {}, `Not known here: ${all.find((one) => one.key === key)?.label ?? key}`));
    fill(above, head(run, data, key));
    fill(chooser, sequences(run, data, key));
    remember();
  }
  function go(at, scroll = "nearest") {
    strip.choose(at, scroll);
    card.show(at);
    remember();
  }
  /** The address says what is looked at, so that a link to it can be shared. */
  function remember() {
    const kind = data.samples || data.turns > 1 ? { [data.kind]: data.number } : {};
    const at = strip.chosen === null ? {} : { at: strip.chosen };
    history.replaceState(null, "", toRun(run.name, "tokens", { id: data.rollout.index, ...kind, stream: wanted, ...at }));
  }

  fill(root, h("div", { class: "stack" },
    above, notices(data),
    h("div", { class: "controls" }, h("label", {}, "Colour by", choice), legend, h("span", { class: "grow" }), chooser),
    h("div", { class: "token-inspector" }, h("div", { class: "token-main" }, lines(data, again), strip.element, help(run, data, all)), card.element)));
  walk(strip, () => stream, go);
  show(wanted);
  card.show(null);
  const at = place(data, params);
  if (at !== null) {
    go(at, "center");
    strip.element.focus({ preventScroll: true });
  }
  strip.lay();
  return () => {
    strip.close();
    card.close();
  };
}

/** Which token the address names: by its place (`at`), or among those the policy sampled (`said`). */
function place(data, params) {
  const [at, said] = ["at", "said"].map((name) => (/^\d+$/.test(params.get(name) ?? "") ? Number(params.get(name)) : null));
  if (said !== null) {
    const sampled = data.ids.map((_, index) => index).filter((index) => data.streams.loss_mask[index]);
    return sampled[said] ?? null;
  }
  return at !== null && at < data.ids.length ? at : null;
}

/** What is shown, and the ways from here, on which the stream stays chosen. */
function head(run, data, key) {
  const { rollout, mates } = data;
  const stream = key ? { stream: key } : {};
  const to = (page, params, words) => h("a", { href: toRun(run.name, page, params) }, words);
  const facts = [`step ${rollout.step}`, rollout.env, rollout.actor !== "policy" ? rollout.actor : "", `member ${rollout.member}`,
    `reward ${number(rollout.reward)}`, `${count(rollout.tokens)} sampled tokens`, versions(rollout), rollout.finish && `finish: ${rollout.finish}`];
  return h("div", {},
    h("div", { class: "head" }, h("h1", {}, `Tokens of rollout ${rollout.index}`), h("span", { class: "tag" }, rollout.state),
      h("span", { class: "soft" }, facts.filter(Boolean).join(" · ")), h("span", { class: "grow" }), finder(run, stream)),
    h("nav", { class: "row token-links", "aria-label": "This rollout elsewhere" },
      to("rollouts", { id: rollout.index, ...stream }, "Conversation"),
      rollout.domain === "training" && to("tickets", { ticket: rollout.ticket }, `Ticket ${rollout.ticket}`),
      data.trains && to("replay", { step: rollout.step }, `Replay step ${rollout.step}`),
      mates.length > 1 && h("span", { class: "token-mates" }, h("span", { class: "soft" }, "Group, by reward:"), mates.map((mate) =>
        h("a", { href: toRun(run.name, "tokens", { id: mate.index, ...stream }), "aria-current": mate.index === rollout.index ? "true" : null,
          title: `rollout ${mate.index}, member ${mate.member}${mate.error ? `, failed: ${mate.error}` : ""}` }, mate.error ? "failed" : number(mate.reward))))));
}

function versions({ version_min: low, version_max: high }) {
  if (high < 0) return "";
  return low === high ? `version ${low}` : `versions ${low} to ${high}`;
}

function notices(data) {
  const { rollout } = data;
  return [
    data.trains ? null : h("div", { class: "notice warn" }, h("p", {}, rollout.fate), rollout.error_text ? h("pre", {}, rollout.error_text) : null),
    data.texts ? null : h("div", { class: "notice" }, h("p", {}, data.tokenizer)),
  ];
}

/** Which of several samples or turns is shown. */
function sequences(run, data, stream) {
  const kinds = [["sample", data.samples], ["turn", data.turns]];
  if (data.samples < 2 && data.turns < 2) return null;
  const choice = h("select", { "aria-label": "Sequence", on: { change: () => {
    const [kind, which] = choice.value.split(" ");
    location.hash = toRun(run.name, "tokens", { id: data.rollout.index, [kind]: which, stream });
  } } }, kinds.flatMap(([kind, many]) => Array.from({ length: many }, (_, which) =>
    h("option", { value: `${kind} ${which}`, selected: kind === data.kind && which === data.number }, `${kind} ${which + 1} of ${many}`))));
  return h("label", {}, "Sequence", choice);
}

function finder(run, stream) {
  const field = h("input", { type: "text", inputmode: "numeric", size: 8, placeholder: "Rollout  /", "aria-label": "Go to rollout", "aria-keyshortcuts": "/", data: { search: "" } });
  return h("form", { on: { submit: (event) => {
    event.preventDefault();
    if (/^\d+$/.test(field.value.trim())) location.hash = toRun(run.name, "tokens", { id: field.value.trim(), ...stream });
  } } }, field);
}

function help(run, data, all) {
  const changes = versionsBefore(data).size;
  const missing = all.filter((stream) => stream.missing);
  return h("div", { class: "token-help faint", id: "token-keys" },
    h("p", { class: "keys" }, KEYS.map(([key, words]) => h("span", {}, h("kbd", {}, key), ` ${words}`))),
    changes ? h("p", {}, `New weights came ${changes === 1 ? "once" : `${changes} times`} while this was sampled; a mark shows both versions.`) : null,
    missing.length ? h("p", {}, `${missing.map((stream) => stream.missing).join(". ")}. `,
      data.trains ? [h("a", { href: toRun(run.name, "replay", { step: data.rollout.step }) }, `Replaying step ${data.rollout.step}`), " computes what was clipped, and by which rule."] : null) : null,
    data.texts ? h("p", {}, "Text by ", h("code", {}, data.tokenizer)) : null);
}

/**
 * The ratio, the trainer's log probability, the entropy and the share of the loss of each token, as streams; the rules
 * that held tokens back, by place; and whether the weights were those of the step. Null where there is no replay of it.
 */
async function replayed(run, data) {
  if (!data.trains || data.place === null || data.place === undefined) return null;
  const { results } = await ask("replay", { run: run.name });
  const mine = results.findLast(({ step, changes }) => step === data.rollout.step && !Object.keys(changes).length);
  if (!mine) return null;
  const [{ sample }, { result }] = await Promise.all([
    ask("replay/sample", { run: run.name, of: mine.key, sample: data.place }), ask("replay/result", { run: run.name, of: mine.key })]);
  // A run that went back has other samples under the same step.
  if (!sample?.trained || !result || sample.ids.some((id, at) => id !== data.ids[at])) return null;
  const { places, share, held_back: held, skipped } = sample.trained;
  const column = (values) => {
    const spread = new Array(data.ids.length).fill(null);
    places.forEach((place, at) => (spread[place] = values[at]));
    return spread;
  };
  const rules = new Map();
  for (const { token, component, rule } of held) rules.set(places[token], [...(rules.get(places[token]) ?? []), `${component}: ${rule}`]);
  const total = places.map((_, at) => Object.values(share).reduce((sum, values) => sum + (values[at] ?? 0), 0));
  return {
    ratio: column(sample.trained.ratio), entropy: column(sample.trained.entropy), logprob: column(sample.trained.logprob), share: column(total),
    rules, skipped, exact: result.about.weights.exact, from: result.about.weights.from,
  };
}
