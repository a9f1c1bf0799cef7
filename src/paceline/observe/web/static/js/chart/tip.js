// The small box beside the pointer.
import { fill, h } from "../dom.js";

export class Tip {
  constructor(parent) {
    this.element = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.parent = parent;
    parent.append(this.element);
  }

  /** Show a heading and entries [{colour, label, value, block}] beside x, inside the parent. */
  show(x, heading, entries) {
    const rows = entries.map(({ colour, label, value, block }) =>
      h("div", { class: "entry" },
        h("span", { class: block ? "swatch block" : "swatch", vars: { "--swatch": colour } }),
        h("span", {}, label),
        h("b", {}, value)),
    );
    fill(this.element, h("div", { class: "head" }, heading), rows);
    this.element.hidden = false;
    const { width } = this.element.getBoundingClientRect();
    const room = this.parent.clientWidth;
    const left = x + 14 + width > room ? Math.max(0, x - 14 - width) : x + 14;
    this.element.style.left = `${left}px`;
    this.element.style.top = "6px";
  }

  hide() {
    this.element.hidden = true;
  }
}
