// The result of a replay: the loss beside what was recorded, the weightiest tokens, and every sample with its tokens.
import { ask } from "../api.js";
import { fill, h, scrollable } from "../dom.js";
import { whole } from "../format.js";
import { toRun } from "../router.js";
import { strip } from "./strip.js";
import { changed, figure, share, visible } from "./words.js";

const FIRST = 12;

/** `keys` are {of, against}; `component` is "" for all; `choose` is called with another. */
export function outcome(run, result, keys, component, choose) {
  const samples = samplesList(run, result, keys, component);
  return [
    notices(result),
    h("section", { class: "section", "aria-label": "The loss" }, h("h2", {}, "The loss, recorded and replayed"), lossTable(result)),
    h("section", { class: "section", "aria-label": "Tokens" },
      h("h2", {}, result.other ? "Tokens whose share changes most" : "Tokens that weigh most"),
      h("p", { class: "soft" }, "The loss is a sum over tokens. ", result.other
        ? "Listed is how much of it each token gains or loses by the change."
        : "A token above 0 makes it larger, one below 0 smaller; training moves the weights so that the sum falls."),
      legend(result, component, choose), top(run, result, samples.open)),
    h("section", { class: "section", "aria-label": "Samples" },
      h("h2", {}, "Samples", h("span", { class: "faint" }, `${whole(result.count)} with ${whole(result.tokens)} tokens that train, the weightiest first`)),
      samples.element),
  ];
}

function notices({ about, other }) {
  const remarks = [...new Set([...about.remarks, ...(other?.about.remarks ?? [])])];
  return h("div", { class: `notice ${about.weights.exact ? "" : "warn"}` },
    h("p", {}, "Weights: ", h("code", {}, about.weights.from), about.weights.exact
      ? ", the very ones the step began with. What still differs from the record is the trainer's doing: another device, type or version."
      : ". They are not those the step began with, so the figures differ from the recorded ones. With checkpoint.every = 1 every step has its own."),
    h("p", { class: "soft" }, "Samples: ", about.samples_from === "the record" ? "the record, which keeps every one that trained" : h("code", {}, about.samples_from), ". ",
      about.optimizer_steps > 1 ? `The batch was cut into ${about.optimizer_steps} optimizer steps; the loss is their mean.` : null),
    remarks.length ? h("ul", {}, remarks.map((remark) => h("li", {}, remark))) : null);
}

function lossTable({ about, other, held_back: held, other_held_back: otherHeld }) {
  const names = [...new Set([...Object.keys(about.loss), ...Object.keys(other?.about.loss ?? {})])];
  const rank = (name) => [name === "loss" ? 0 : name.startsWith("loss/") ? 1 : 2, name].join(" ");
  names.sort((a, b) => (rank(a) < rank(b) ? -1 : 1));
  const apart = (a, b) => (Number.isFinite(a) && Number.isFinite(b) ? share(b - a) : "–");
  const line = (name) => {
    const { recorded, replayed } = about.loss[name] ?? {};
    const there = other?.about.loss[name]?.replayed;
    return h("tr", { class: name.startsWith("loss") ? "lead" : null }, h("th", { scope: "row", class: "mono" }, name),
      h("td", { class: "right" }, figure(recorded)), h("td", { class: "right" }, figure(replayed)), h("td", { class: "right soft" }, apart(recorded, replayed)),
      other ? [h("td", { class: "right" }, figure(there)), h("td", { class: "right soft" }, apart(replayed, there))] : null);
  };
  const heads = ["", "recorded", "replayed", "difference", ...(other ? ["with the change", "difference to replayed"] : [])];
  return [other ? h("p", {}, "The change: ", h("code", {}, changed(other.changes))) : null, scrollable("Figures of the step", h("table", { class: "list losses" },
    h("caption", { class: "unseen" }, "The step's figures as recorded and as replayed"),
    h("thead", {}, h("tr", {}, heads.map((head, at) => (head ? h("th", { scope: "col", class: at ? "right" : null }, head) : h("td", {}))))),
    h("tbody", {}, names.map(line)))),
  h("p", { class: "soft" }, `Tokens held back by a bound of the loss: ${whole(held)}`, other ? `; with the change ${whole(otherHeld)}` : null, ".")];
}

function legend(result, component, choose) {
  const names = [...new Set([...result.about.components, ...(result.other?.about.components ?? [])])];
  const buttons = names.length > 1 ? ["", ...names].map((name) => h("button", {
    type: "button", class: "quiet", "aria-pressed": String(name === component), on: { click: () => choose(name) },
  }, name || "all components")) : [];
  return h("div", { class: "row pull-legend" },
    h("span", { class: "key pull-down" }, result.other ? "loses" : "below 0"), h("span", { class: "key pull-up" }, result.other ? "gains" : "above 0"),
    h("span", { class: "key pull-held" }, "held back by a bound"), h("span", { class: "faint" }, `full colour: ${figure(result.largest)}`),
    buttons.length ? h("span", { class: "choice", role: "group", "aria-label": "Component" }, buttons) : null);
}

function top(run, result, open) {
  if (!result.top.length) return h("p", { class: "soft" }, result.other ? "No token's share changes." : "No token has a share of the loss.");
  const both = Boolean(result.other);
  const held = result.top.some((one) => one.rule || one.other_rule);
  const words = held ? 2 : 1;
  const body = h("tbody");
  const row = (one) => h("tr", {},
    h("th", { scope: "row" }, h("button", { type: "button", class: "quiet mono", on: { click: () => open(one.sample, one.token) } }, visible(one.text, one.id))),
    h("td", { class: "right" }, share(one.share)), both ? [h("td", { class: "right" }, share(one.other)), h("td", { class: "right" }, share(one.other - one.share))] : null,
    h("td", { class: "right" }, share(one.advantage)), h("td", { class: "right" }, figure(one.ratio)),
    held && h("td", { class: "soft rules" }, [one.rule, both && one.other_rule ? `with the change ${one.other_rule}` : ""].filter(Boolean).join("; ")),
    h("td", {}, place(run, one)));
  const heads = ["token", both ? "share as it was set" : "share", ...(both ? ["share with the change", "difference"] : []), "advantage", "ratio", ...(held ? ["held back by"] : []), "where"];
  const draw = (count) => fill(body, result.top.slice(0, count).map(row));
  draw(FIRST);
  const more = result.top.length > FIRST
    ? h("button", { type: "button", class: "quiet", on: { click: () => { draw(result.top.length); more.remove(); } } }, `show ${result.top.length - FIRST} more`) : null;
  return [scrollable("Tokens by their share of the loss", h("table", { class: "list weighty" },
    h("caption", { class: "unseen" }, "Tokens by their share of the loss"),
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: at && at < heads.length - words ? "right" : null }, head)))), body)), more];
}

/** Links to the token and its rollout, where the record has them. */
function place(run, one) {
  if (one.rollout === null) return h("span", { class: "faint" }, `sample ${one.sample}`);
  const sample = one.number ? { sample: one.number } : {};
  return [h("a", { href: toRun(run.name, "tokens", { id: one.rollout, ...sample, ...(one.place === undefined ? {} : { at: one.place }) }) }, "tokens"), " ",
    h("a", { href: toRun(run.name, "rollouts", { id: one.rollout }) }, `rollout ${one.rollout}`)];
}

function samplesList(run, result, keys, component) {
  const element = h("div", { class: "sample-list" });
  const made = new Map();
  let shown = 0;
  const most = Math.max(1e-30, ...result.samples.map((one) => Math.abs(result.other ? one.other - one.share : one.share)));

  function add(one) {
    const value = result.other ? one.other - one.share : one.share;
    const body = h("div");
    const fold = h("details", { class: "sample" },
      h("summary", {}, h("span", { class: `bar-of ${value > 0 ? "pull-up" : "pull-down"}`, vars: { "--amount": `${Math.round(100 * Math.abs(value) / most)}%` } }),
        h("b", {}, share(value)), ` ${one.env}, ticket ${one.ticket ?? "–"}, member ${one.member}`,
        h("span", { class: "faint" }, `${one.trained} of ${one.length} tokens train${one.held_back ? `, ${one.held_back} held back` : ""}${one.skipped ? ", left out as a whole" : ""}`)),
      body);
    const fetched = async (at = null) => {
      fill(body, h("p", { class: "faint" }, "Reading…"));
      try {
        const { sample } = await ask("replay/sample", { run: run.name, ...keys, sample: one.sample });
        if (!sample) throw new Error("This result is no longer kept: replay the step again.");
        fill(body, strip(sample, component, result.largest, at), h("p", {}, place(run, { ...one, place: undefined })));
      } catch (error) {
        fill(body, h("p", { class: "notice bad" }, error.message));
      }
    };
    fold.addEventListener("toggle", () => fold.open && !body.firstChild && fetched());
    made.set(one.sample, { fold, body, fetched });
    return fold;
  }

  function more() {
    const next = result.samples.slice(shown, shown + 40);
    shown += next.length;
    element.append(...next.map(add));
    const left = result.samples.length - shown;
    if (left) {
      const button = h("button", { type: "button", class: "quiet", on: { click: () => { button.remove(); more(); } } }, `${left} more samples`);
      element.append(button);
    } else if (result.count > result.samples.length) {
      element.append(h("p", { class: "faint" }, `${whole(result.count - result.samples.length)} samples that weigh less are not listed.`));
    }
  }

  async function open(sample, token) {
    while (!made.has(sample) && shown < result.samples.length) {
      element.lastElementChild.remove();
      more();
    }
    const found = made.get(sample);
    if (!found) return;
    await found.fetched(token);
    found.fold.open = true;
    found.body.querySelector("button.bit[tabindex='0']")?.focus();
    found.fold.scrollIntoView({ block: "center" });
  }

  more();
  return { element, open };
}
