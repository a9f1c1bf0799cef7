// The form above the list: each field is a part of the query.
import { fill, h } from "../dom.js";
import { whole } from "../format.js";
import { FINISH, isFiltered, stateWords, unfiltered } from "./words.js";

const TYPING = 300; // milliseconds after the last key

export class Filters {
  /** `changed` is called with the new query. */
  constructor(query, changed) {
    this.query = { ...query };
    this.changed = changed;
    this.selects = {
      env: this.#select("env", "Environment"), state: this.#select("state", "State"), domain: this.#select("domain", "Purpose"),
      actor: this.#select("actor", "Actor"), error: this.#select("error", "Error"), finish: this.#select("finish", "Finish"),
    };
    const search = this.#input("text", {
      type: "search", placeholder: "Search messages…  /", "aria-label": "Search messages", "aria-keyshortcuts": "/", data: { search: "" }, size: 26,
    });
    this.inputs = [search];
    const ranges = [["step", "Step", 1], ["reward", "Reward", "any"], ["length", "Tokens", 1]].map(([name, label, step]) => this.#range(name, label, step));
    const ticket = this.#input("ticket", { type: "number", step: 1, class: "narrow", "aria-label": "Ticket" });
    const row = this.#input("row", { type: "number", step: 1, class: "narrow", "aria-label": "Row of the data" });
    this.inputs.push(ticket, row);
    this.clear = h("button", { type: "button", class: "quiet", on: { click: () => this.#reset() } }, "Clear filters");
    this.more = h("div", { class: "more-filters", id: "more-filters" }, Object.values(this.selects).map(({ element }) => element), ranges,
      h("label", {}, "Ticket", ticket), h("label", {}, "Row", row));
    this.fold = h("button", { type: "button", class: "fold", "aria-expanded": "false", "aria-controls": "more-filters", on: { click: () => this.#unfold() } }, "Filters");
    this.element = h("form", { class: "filters", role: "search", "aria-label": "Filter rollouts", on: { submit: (event) => event.preventDefault() } },
      search, this.fold, this.more, this.clear);
    this.#show();
  }

  /** What there is to choose from, with how many of each the run has. A choice of one alone is none. */
  offer(counts) {
    const plain = (names) => Object.entries(names).filter(([name]) => name).map(([name, many]) => [name, name, many]);
    this.#options("env", plain(counts.env));
    this.#options("actor", plain(counts.actor));
    this.#options("finish", plain(counts.finish).map(([name, label, many]) => [name, FINISH[name] ?? label, many]));
    this.#options("domain", plain(counts.domain));
    const states = Object.entries(counts.state).sort().map(([name, many]) => [name, stateWords(name), many]);
    const dropped = states.filter(([name]) => name.startsWith("dropped:"));
    const all = dropped.reduce((sum, [, , many]) => sum + many, 0);
    this.#options("state", dropped.length ? [...states, ["dropped:", "dropped, for any reason", all]] : states);
    const errors = plain(counts.error);
    const broken = errors.reduce((sum, [, , many]) => sum + many, 0);
    this.#options("error", errors.length ? [["any", "any error", broken], ["none", "no error", null], ...errors] : []);
  }

  #options(name, options) {
    const { element, select } = this.selects[name];
    const chosen = this.query[name] ?? "";
    if (chosen && !options.some(([value]) => value === chosen)) options.push([chosen, stateWords(chosen), 0]);
    element.hidden = options.length < 2 && !chosen;
    fill(select, h("option", { value: "" }, "all"), options.map(([value, label, many]) =>
      h("option", { value, selected: value === chosen }, many === null ? label : `${label} (${whole(many)})`)));
  }

  #select(name, label) {
    const select = h("select", { on: { change: () => this.#set(name, select.value) } });
    return { select, element: h("label", { hidden: true }, label, select) };
  }

  #range(name, label, step) {
    const ends = ["from", "to"].map((end) => this.#input(`${name}_${end}`, {
      type: "number", step, class: "narrow", placeholder: end, "aria-label": `${label} ${end}`,
    }));
    this.inputs.push(...ends);
    return h("span", { class: "range", role: "group", "aria-label": label }, h("span", {}, label), ends[0], h("span", { "aria-hidden": "true" }, "–"), ends[1]);
  }

  #input(name, attributes) {
    let waiting = 0;
    const field = h("input", {
      ...attributes, value: this.query[name] ?? "", data: { ...attributes.data, field: name },
      on: {
        input: () => {
          clearTimeout(waiting);
          waiting = setTimeout(() => field.isConnected && this.#set(name, field.value.trim()), TYPING);
        },
      },
    });
    return field;
  }

  #set(name, value) {
    if ((this.query[name] ?? "") === value) return;
    if (value) this.query[name] = value;
    else delete this.query[name];
    this.#show();
    this.changed(this.query);
  }

  #reset() {
    this.query = unfiltered(this.query);
    for (const field of this.inputs) field.value = "";
    for (const { select } of Object.values(this.selects)) select.value = "";
    this.#show();
    this.changed(this.query);
  }

  /** On a phone the rollouts come before the filters. */
  #unfold() {
    const open = this.more.classList.toggle("open");
    this.fold.setAttribute("aria-expanded", String(open));
  }

  #show() {
    this.clear.hidden = !isFiltered(this.query);
  }
}
