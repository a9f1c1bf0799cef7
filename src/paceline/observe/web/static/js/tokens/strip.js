// All tokens of a sequence as chips. Long ones are laid out block by block, the one in view first, so that the page answers
// meanwhile.
import { h } from "../dom.js";
import { breaks, colour, componentsOf, partColour, piece } from "./streams.js";

const BLOCK = 400;

export class Strip {
  /** `again` is a replay of the step, or null. `choose(at, really)`: a token is pointed at, or really chosen; null when the pointer leaves. */
  constructor(data, again, choose) {
    Object.assign(this, { data, again, chosen: null, stream: null, chips: new Array(data.ids.length) });
    this.before = versionsBefore(data);
    this.blocks = splitBlocks(data);
    this.element = h("div", {
      class: "token-strip", role: "listbox", tabindex: 0, "aria-label": `Tokens, ${data.ids.length} of them`, "aria-describedby": "token-keys",
      on: {
        pointerover: (event) => withToken(event, (at) => choose(at, false)),
        pointerleave: () => choose(null, false),
        click: (event) => withToken(event, (at) => choose(at, true)),
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
      if (this.before.has(at)) chips.push(swap(this.before.get(at), this.data.streams.versions[at]));
      chips.push(this.#chip(at));
      if (breaks(this.data, at)) chips.push(document.createElement("br"));
    }
    block.laid = true;
    block.element.replaceChildren(...chips);
  }

  #chip(at) {
    const { shown, kind } = piece(this.data, at);
    const sampled = this.data.streams.loss_mask[at];
    const by = componentsOf(this.data, at);
    const chip = document.createElement("span");
    const held = (this.data.streams.clipped?.[at] === 1 || this.again?.rules.has(at)) ? "held" : "";
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
export function versionsBefore(data) {
  const found = new Map();
  let before = null;
  (data.streams.versions ?? []).forEach((version, at) => {
    if (version < 0) return;
    if (before !== null && version !== before) found.set(at, before);
    before = version;
  });
  return found;
}

/** Blocks of tokens that end with a line where they can: a block begins on a line of its own. */
function splitBlocks(data) {
  const blocks = [];
  for (let first = 0; first < data.ids.length;) {
    let end = Math.min(first + BLOCK, data.ids.length);
    while (end < data.ids.length && end - first < 2 * BLOCK && !breaks(data, end - 1)) end += 1;
    blocks.push({ first, end, laid: false });
    first = end;
  }
  return blocks;
}

function swap(before, version) {
  const words = `New weights: before it version ${before} sampled, from here on version ${version}`;
  return h("span", { class: "token-swap", role: "none", title: words }, `v${before} → v${version}`);
}

function withToken(event, then) {
  const chip = event.target.closest?.(".token-chip");
  if (chip) then(Number(chip.dataset.at));
}

/** The keys, as the page lists them. */
export const KEYS = [
  ["← →", "a token back, on"], ["↑ ↓", "a line up, down"], ["Home End", "first, last"],
  ["n", "next token that trains (Shift: the one before)"], ["p", "next by size of the value, the largest first (Shift: back)"], ["v", "next change of version"],
];

/** Answers keys of a strip: `go(at)` is called with the token to choose, `stream()` gives the one that is shown. */
export function walk(strip, stream, go) {
  const { data } = strip;
  const trains = data.ids.map((_, at) => componentsOf(data, at).length > 0);
  const bounds = [...versionsBefore(data).keys()];
  let peaks = { stream: null, order: [] };
  const last = data.ids.length - 1;

  const seek = (from, by) => {
    for (let at = from + by; at >= 0 && at <= last; at += by) if (trains[at]) return at;
    return null;
  };
  const peak = (here, by) => {
    const now = stream();
    if (peaks.stream !== now) {
      const values = now.values ?? [];
      const known = values.map((value, at) => [at, Math.abs((value ?? now.centre ?? 0) - (now.centre ?? 0))]).filter(([, size]) => size > 0);
      peaks = { stream: now, order: known.sort((one, other) => other[1] - one[1] || one[0] - other[0]).map(([at]) => at) };
    }
    const place = peaks.order.indexOf(here);
    if (place < 0) return peaks.order[0] ?? null;
    return peaks.order[Math.max(0, Math.min(peaks.order.length - 1, place + by))];
  };

  strip.element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const here = strip.chosen ?? 0;
    const back = event.shiftKey;
    const to = {
      ArrowLeft: () => here - 1, ArrowRight: () => here + 1, Home: () => 0, End: () => last,
      ArrowUp: () => line(strip, here, -1), ArrowDown: () => line(strip, here, 1),
      n: () => seek(here, back ? -1 : 1), p: () => peak(here, back ? -1 : 1), v: () => bounds.find((at) => at > here) ?? bounds[0],
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    if (to !== null) go(Math.max(0, Math.min(last, to)));
  });
}

/** The token nearest below or above: chips of one line end at the same height. */
function line(strip, here, by) {
  const box = strip.chip(here).getBoundingClientRect();
  let best = null;
  let bottom = null;
  for (let at = here + by; at >= 0 && at < strip.chips.length; at += by) {
    const other = strip.chip(at).getBoundingClientRect();
    if (Math.abs(other.bottom - box.bottom) < 2) continue;
    bottom ??= other.bottom;
    if (Math.abs(other.bottom - bottom) >= 2) break;
    const apart = Math.abs(other.left - box.left);
    if (best === null || apart < best.apart) best = { at, apart };
  }
  return best?.at ?? here;
}
