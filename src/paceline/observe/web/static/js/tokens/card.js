// One token explained: what it is, its streams, and the formulas that train it with their numbers.
import { ask } from "../api.js";
import { fill, h, prose } from "../dom.js";
import { toRun } from "../router.js";
import { componentsOf, figure, piece, streamText, visible } from "./streams.js";

/** Milliseconds a token must be pointed at before the server is asked. */
const PATIENCE = 50;

const SYMBOLS = "A: advantage. π: the policy in training. μ: the policy that sampled. r: how far it has moved since.";

export class Card {
  constructor(run, data, again, streams) {
    Object.assign(this, { run, data, again, streams });
    this.element = h("aside", { class: "token-card", "aria-label": "The chosen token", "aria-live": "polite" });
    this.known = new Map();
    this.shown = undefined;
  }

  /** Show a token: what the page knows at once, and what the server works out when it comes. */
  async show(at) {
    if (at === this.shown) return;
    this.shown = at;
    this.asked?.abort();
    clearTimeout(this.soon);
    if (at === null) {
      fill(this.element, h("p", { class: "soft" }, "Point at a token, or go there with the arrow keys, to see how it trains."));
      return;
    }
    const place = h("div", { class: "made" }, h("p", { class: "faint" }, "…"));
    fill(this.element, this.#head(at), this.#replayed(at), place, this.#figures(at));
    if (this.known.has(at)) fill(place, this.#made(this.known.get(at)));
    else this.soon = setTimeout(() => this.#ask(at, place), PATIENCE);
  }

  close() {
    clearTimeout(this.soon);
    this.asked?.abort();
  }

  async #ask(at, place) {
    this.asked = new AbortController();
    const { rollout, kind, number: which } = this.data;
    try {
      const card = await ask("tokens/card", { run: this.run.name, id: rollout.index, [kind]: which, at }, this.asked.signal);
      this.known.set(at, card);
      fill(place, this.#made(card));
    } catch (error) {
      if (error.name !== "AbortError") fill(place, h("p", { class: "wrong" }, error.message));
    }
  }

  #head(at) {
    const { data } = this;
    const { shown, kind } = piece(data, at);
    const part = data.parts[at];
    const text = data.texts?.[at];
    return [
      h("h2", {}, h("span", { class: `token-chip big ${kind}` }, shown)),
      h("p", { class: "soft" }, `token ${at} of ${data.ids.length}, id ${data.ids[at]}`, this.#turn(at)),
      text ? h("p", { class: "mono quoted" }, JSON.stringify(text)) : null,
      part ? h("p", { class: "soft" }, `Bytes ${part.bytes}: no whole character by themselves`, part.of ? `, together with its neighbours “${part.of}”.` : ".") : null,
    ];
  }

  #turn(at) {
    const place = this.data.spans.findIndex(([first, end]) => at >= first && at < end);
    return place < 0 ? ", given to the policy" : `, sampled in turn ${place + 1}`;
  }

  #figures(at) {
    const { data } = this;
    const print = data.weights[data.streams.versions?.[at]];
    const rows = this.streams.filter((stream) => stream.values && stream.values[at] !== null && stream.values[at] !== undefined).map((stream) => [stream.label, streamText(stream, at), stream.meaning]);
    const logprob = data.streams.loss_mask[at] ? data.streams.logprobs?.[at] : undefined;
    if (logprob !== undefined) rows.splice(1, 0, ["probability", figure(Math.exp(logprob)), "μ, the sampler's"]);
    return [
      h("h3", {}, "Streams"),
      h("dl", { class: "figures" }, rows.map(([label, value, meaning]) => h("div", { title: meaning }, h("dt", {}, label), h("dd", {}, value)))),
      print ? h("p", { class: "faint" }, "weights ", h("code", {}, print)) : null,
    ];
  }

  /** What the replay of the step says of it. */
  #replayed(at) {
    const { again } = this;
    if (!again || again.ratio[at] === null) return null;
    const rules = [...(again.rules.get(at) ?? []), ...(again.skipped ? ["the whole sample was left out (trainer.clip_skip_threshold)"] : [])];
    return h("div", { class: "token-line" },
      h("div", { class: "what" }, h("span", {}, "ratio, replayed"), h("b", {}, figure(again.ratio[at]))),
      h("div", { class: "formula" }, `log π ${figure(again.logprob[at])}, share of the loss ${figure(again.share[at])}`),
      h("div", { class: rules.length ? "why" : "note" }, rules.length ? `Held back. ${rules.join("; ")}` : "No bound held it back."),
      again.exact ? null : h("div", { class: "note" }, `Only near: replayed with the weights of ${again.from}, not those that the step began with.`));
  }

  /** The most likely tokens at this place, the sampled one marked. */
  #alternatives(ranked) {
    const own = this.data.ids[this.shown];
    return ranked.length ? [
      h("h3", {}, "Most likely here"),
      h("ol", { class: "alternatives" }, ranked.map(({ id, logprob, text, bytes }) => {
        const share = Math.exp(logprob);
        return h("li", { class: id === own ? "own" : "", title: `id ${id}, log probability ${figure(logprob)}` },
          h("span", { class: "token-chip" }, text === null ? (bytes ?? `#${id}`) : visible(text)),
          h("span", { class: "bar", vars: { "--share": `${(100 * share).toFixed(1)}%` } }),
          h("b", {}, figure(share)), id === own ? h("span", { class: "unseen" }, "sampled") : null);
      }))] : null;
  }

  #made({ lines, why, by, alternatives }) {
    const names = Object.entries(by).map(([part, weight]) => `${part} (weight ${figure(weight)})`);
    const { trains, rollout } = this.data;
    return [
      names.length ? h("p", {}, trains ? "Trained by " : "Would train by ", h("b", {}, names.join(", ")), ".") : null,
      why ? h("p", { class: "why" }, prose(why)) : null,
      lines.filter(({ name, replay }) => !(this.again && name === "ratio" && replay)).map((line) => this.#line(line)),
      lines.length ? h("p", { class: "faint" }, SYMBOLS) : null,
      lines.some((line) => line.replay) && trains && !this.again
        ? h("p", {}, h("a", { href: toRun(this.run.name, "replay", { step: rollout.step }) }, `Replay step ${rollout.step}`), " to compute what is not recorded.") : null,
      this.#alternatives(alternatives),
      !names.length && !why && !componentsOf(this.data, this.shown).length ? h("p", { class: "soft" }, "A turn as the engine answered it; its samples say how it trains.") : null,
    ];
  }

  #line({ name, formula, numbers, value, note, wrong, replay }) {
    const result = value === null ? (replay ? "not recorded" : "") : signedFigure(name, value);
    return h("div", { class: wrong ? "token-line wrong" : "token-line" },
      h("div", { class: "what" }, h("span", {}, name), h("b", { class: value === null ? "faint" : "" }, result)),
      formula ? h("div", { class: "formula" }, `= ${formula}`) : null,
      numbers ? h("div", { class: "formula numbers" }, `= ${numbers}`, value === null ? "" : ` = ${signedFigure(name, value)}`) : null,
      note ? h("div", { class: "note" }, note) : null);
  }
}

function signedFigure(name, value) {
  return (name === "advantage" && value > 0 ? "+" : "") + figure(value);
}
