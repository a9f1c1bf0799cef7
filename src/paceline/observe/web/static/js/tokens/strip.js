// All tokens of a sequence as chips. Long ones are laid out block by block, the one in view first, so that the page answers
// meanwhile.
import { h } from "../dom.js";
import { colour, componentsOf, partColour } from "./streams.js";
import { breaks, piece } from "./visible.js";

const BLOCK = 400;

export class Strip {
  /** `again` is a replay of the step, or null. `choose(at, really)`: a token is pointed at, or really chosen; null when the pointer leaves. */
  constructor(told, again, choose) {
    Object.assign(this, { told, again, chosen: null, stream: null, chips: new Array(told.ids.length) });
    this.before = versionsBefore(told);
    this.blocks = cut(told);
    this.element = h("div", {
      class: "token-strip", role: "listbox", tabindex: 0, "aria-label": `Tokens, ${told.ids.length} of them`, "aria-describedby": "token-keys",
      on: {
        pointerover: (event) => pointed(event, (at) => choose(at, false)),
        pointerleave: () => choose(null, false),
        click: (event) => pointed(event, (at) => choose(at, true)),
      },
    }, this.blocks.map((block) => (block.element = h("div", { class: "token-block", role: "none" }))));
  }

  /** Lay out all that is missing, a block a frame. */
  lay(from = 0) {
    const next = this.blocks.findIndex((block, place) => place >= from && !block.laid);
    if (next < 0) return;
    this.#lay(this.blocks[next]);
    this.waiting = requestAnimationFrame(() => this.lay(next + 1));
  }

  close() {
    cancelAnimationFrame(this.waiting);
  }

  paint(stream) {
    this.stream = stream;
    this.chips.forEach((chip, at) => this.#tint(chip, at));
  }

  /** The chip of a token, laid out now if it is not yet. */
  chip(at) {
    if (!this.chips[at]) this.#lay(this.blocks.findLast(({ first }) => first <= at));
    return this.chips[at];
  }

  /** Mark a token as chosen, with what stands around it. `scroll` says where it comes to lie, if it is to be seen. */
  choose(at, scroll) {
    this.chips[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = at;
    const chip = this.chip(at);
    const here = this.blocks.findIndex(({ end }) => at < end);
    for (const block of [this.blocks[here - 1], this.blocks[here + 1]]) if (block && !block.laid) this.#lay(block);
    chip.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", chip.id);
    if (scroll) chip.scrollIntoView({ block: scroll });
  }

  #lay(block) {
    const chips = [];
    for (let at = block.first; at < block.end; at += 1) {
      if (this.before.has(at)) chips.push(swap(this.before.get(at), this.told.streams.versions[at]));
      chips.push(this.#chip(at));
      if (breaks(this.told, at)) chips.push(document.createElement("br"));
    }
    block.laid = true;
    block.element.replaceChildren(...chips);
  }

  #chip(at) {
    const { shown, kind } = piece(this.told, at);
    const sampled = this.told.streams.loss_mask[at];
    const by = componentsOf(this.told, at);
    const chip = document.createElement("span");
    const held = this.again?.rules.has(at) ? "held" : "";
    chip.className = ["token-chip", kind, sampled ? "" : "given", by.length ? "trains" : sampled ? "silent" : "", held].filter(Boolean).join(" ");
    chip.id = `token-${at}`;
    chip.dataset.at = at;
    chip.setAttribute("role", "option");
    chip.setAttribute("aria-selected", "false");
    chip.textContent = shown;
    if (by.length) chip.style.setProperty("--by", partColour(by));
    this.chips[at] = chip;
    this.#tint(chip, at);
    return chip;
  }

  #tint(chip, at) {
    if (!this.stream?.values) return;
    const { tint, t } = colour(this.stream, at);
    chip.style.setProperty("--tint", tint);
    chip.style.setProperty("--t", t.toFixed(3));
  }
}

/** Where new weights came while the tokens were sampled, and the version before: place to version. */
export function versionsBefore(told) {
  const found = new Map();
  let before = null;
  (told.streams.versions ?? []).forEach((version, at) => {
    if (version < 0) return;
    if (before !== null && version !== before) found.set(at, before);
    before = version;
  });
  return found;
}

/** Blocks of tokens that end with a line where they can: a block begins on a line of its own. */
function cut(told) {
  const blocks = [];
  for (let first = 0; first < told.ids.length;) {
    let end = Math.min(first + BLOCK, told.ids.length);
    while (end < told.ids.length && end - first < 2 * BLOCK && !breaks(told, end - 1)) end += 1;
    blocks.push({ first, end, laid: false });
    first = end;
  }
  return blocks;
}

function swap(before, version) {
  const words = `New weights: before it version ${before} sampled, from here on version ${version}`;
  return h("span", { class: "token-swap", role: "none", title: words }, `v${before} → v${version}`);
}

function pointed(event, then) {
  const chip = event.target.closest?.(".token-chip");
  if (chip) then(Number(chip.dataset.at));
}
