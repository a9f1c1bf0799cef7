// Vital signs: is it alive, does it learn, is it quick, and who waits for whom.
import { fill, h } from "./dom.js";
import { change, count, moment, number, percent, seconds, whole } from "./format.js";
import { meaning } from "./status.js";

const FEW = 10;

export class Vitals {
  constructor(run) {
    this.run = run;
    this.element = h("dl", { class: "vitals", "aria-label": "Vital signs" });
  }

  /** What is drawn anew differs from what is there, so that nothing flickers. */
  draw() {
    const tiles = this.#tiles();
    const text = JSON.stringify(tiles);
    if (text === this.before) return;
    this.before = text;
    fill(this.element, tiles.map(({ name, value, more, kind, moved, done }) => h("div", {},
      h("dt", {}, name),
      h("dd", { class: kind }, value, delta(moved)),
      done !== undefined && h("dd", { class: "progress", "aria-hidden": "true", vars: { "--done": `${done}%` } }, h("i")),
      h("dd", { class: "more" }, more))));
  }

  #tiles() {
    const { status, standing } = this.run;
    const total = status.total_steps;
    const { reward, eval: held, eval_kind: kind } = this.run.ends;
    const stale = this.#recent("staleness/mean");
    const allowed = standing.staleness;
    return [
      { name: "State", value: status.state, kind: "words", more: this.#when() },
      {
        name: "Step", value: total ? `${whole(status.step)} of ${whole(total)}` : whole(status.step),
        done: total ? Math.min(100, (100 * status.step) / total) : undefined, more: this.#left(),
      },
      { name: "Reward", value: number(reward?.last), moved: changeText(reward), more: reward ? since(reward) : this.run.status.alive ? "no batch trained yet" : "no batch trained" },
      { name: `Held-out ${kind}`, value: number(held?.last), moved: changeText(held), more: held ? since(held) : this.run.status.alive ? "no evaluation yet" : "no evaluation" },
      {
        name: "Staleness", value: number(stale),
        more: stale === undefined ? "" : `versions old, at most ${number(this.#most("staleness/max"))}${allowed === undefined || allowed === null ? "" : ` of ${allowed} allowed`}`,
      },
      { name: "Tokens a second", value: count(this.#recent("tokens/s")), more: `sampled; ${count(this.#recent("train_tokens/s"))} trained` },
      { name: "Who waits", ...this.#waits(), kind: "words" },
    ];
  }

  #when() {
    const { state, began, ended, alive } = this.run.status;
    const last = ended ?? (alive ? Date.now() / 1000 : this.#lastTime());
    if (!began) return meaning(state);
    return `${alive ? "for" : "took"} ${seconds(Math.round(Math.max(0, last - began)))}, began ${moment(began).slice(5, 16)}`;
  }

  #lastTime() {
    const times = (this.run.columns.time ?? []).filter((value) => value !== null);
    return times.at(-1) ?? this.run.status.began;
  }

  /** By the pace of the last steps, evaluations between them included. */
  #left() {
    const { step, total_steps: total, alive } = this.run.status;
    const times = this.run.columns.time ?? [];
    if (times.length < 3) return "";
    const from = Math.max(0, times.length - 1 - 2 * FEW);
    const pace = (times.at(-1) - times[from]) / (times.length - 1 - from);
    const each = `${seconds(pace)} a step`;
    return alive && total > step ? `${each}, about ${seconds(Math.round(pace * (total - step)))} left` : each;
  }

  #waits() {
    const [trainer, sampler] = [this.#recent("busy/trainer"), this.#recent("busy/sampler")];
    const wait = this.#recent("wait_time_ratio");
    if (trainer === undefined && wait === undefined) return { value: "–", more: "not measured" };
    const more = `trainer busy ${percent(trainer)}, sampler ${percent(sampler)}`;
    if (wait > 0.3 && wait >= 1 - sampler) return { value: `the trainer, for rollouts (${percent(wait)})`, more };
    if (sampler < 0.65) return { value: `the sampler, for the trainer (${percent(1 - sampler)})`, more };
    if (wait > 0.3) return { value: `the trainer, for rollouts (${percent(wait)})`, more };
    return { value: "neither for long", more };
  }

  #values(name) {
    return (this.run.columns[name] ?? []).filter((value) => value !== null);
  }

  #recent(name) {
    return mean(this.#values(name).slice(-FEW));
  }

  #most(name) {
    const values = this.#values(name).slice(-FEW);
    return values.length ? Math.max(...values) : undefined;
  }
}

/** How far a figure has moved since the start; nothing while the start is all there is. */
export function changeText(ends) {
  return ends?.moved ? change(ends.first, ends.last) : "";
}

export function delta(text) {
  return text && h("span", { class: `delta ${text.startsWith("+") ? "up" : text.startsWith("−") ? "down" : ""}` }, text);
}

/** The steps a figure is of, and what it was at the start. */
export function since({ first, first_steps: from, last_steps: to, moved }) {
  return moved ? `${to}, from ${number(first)} (${from})` : to;
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : undefined;
}
